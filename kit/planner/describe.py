"""A layout in one line, in the words of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from kit.specs.layout import DEFAULTS, FLAGS, Layout


def engine_name(layout: Layout) -> str:
    """The engine's name, with the implementation if it is not the engine's default."""
    over = layout.engine == "deepspeed" and layout.implementation != "huggingface"
    return layout.engine + (" over megatron" if over else "")


def sharding(layout: Layout) -> str:
    """``zero_stage`` in the engine's own words: DDP, FSDP2, ZeRO-2, distributed optimizer; may be empty."""
    if layout.engine == "torch":
        return ("DDP" if layout.dp > 1 else "", "ZeRO-1", "FSDP2 (zero_stage=2)", "FSDP2")[layout.zero_stage]
    if layout.engine == "megatron" and layout.zero_stage == 1:
        return "distributed optimizer"
    return f"ZeRO-{layout.zero_stage}" if layout.zero_stage else ""


def describe(layout: Layout) -> str:
    """One line: engine, every size that is not one, sharding, flags that are not the default, micro batches."""
    sizes = [f"{name}={size}" for name in ("tp", "cp", "pp", "vp", "ep", "etp") if (size := getattr(layout, name)) > 1]
    ends = [str(end) for end in (layout.first_stage_layers, layout.last_stage_layers) if end]
    stages = f"end stages of {' and '.join(ends)} layers" if ends else ""
    # Nearly all flags have their defaults; comparing tuples finds the others without a call for each.
    given = zip(FLAGS, _values_of(layout), _DEFAULTS, strict=True)
    flags = [flag_text(layout, name, value) for name, value, default in given if value != default]
    batches = f"micro batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
    parts = [
        engine_name(layout),
        *sizes,
        stages,
        "sp" * layout.sp,
        f"dp={layout.dp}",
        sharding(layout),
        *flags,
        batches,
    ]
    return ", ".join(filter(None, parts))


_values_of = attrgetter(*FLAGS)
_DEFAULTS = tuple(DEFAULTS[name] for name in FLAGS)


def flag_text(layout: Layout, name: str, value: Any) -> str:
    """Words for a flag's value that is not its default; may be empty."""
    if name == "cp_comm_type" and layout.cp == 1:
        return ""
    text = FLAGS[name].text
    named = ", ".join(value) if isinstance(value, tuple) else value
    return text.get(value, "") if isinstance(text, Mapping) else text.format(value=named)

"""Rules of accelerate's parallelism_config: what accelerate refuses of its sizes (accelerate/parallelism_config.py,
__post_init__ and _validate_accelerator, and state.py, AcceleratorState)."""

from __future__ import annotations

import math
from collections.abc import Callable

from kit.addons.lint.config import Config
from kit.addons.lint.rule import Case, Rule, table

DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_BACKENDS = {"cp": "torch", "sp": "deepspeed"}


def key(name: str) -> str:
    return f"parallelism_config.parallelism_config_{name}" if name else "parallelism_config"


def size(config: Config, dimension: str) -> float:
    """A missing size is 1."""
    given = config.number(key(f"{dimension}_size"))
    return 1 if given is None else given


def _kind(config: Config) -> str:
    """Who makes the groups: ``FSDP2``, ``DEEPSPEED``, ``MULTI`` (DDP), or another, which can have none. Empty where
    nothing reads the section: one process starts without it."""
    kind = config.get("distributed_type")
    if not isinstance(kind, str) or kind in ("NO", "MULTI_CPU") or not config.section("parallelism_config"):
        return ""
    if kind == "FSDP":
        return "FSDP2" if config.number("fsdp_config.fsdp_version") == 2 else "FSDP1"
    return "MULTI" if kind.startswith("MULTI_") else kind


def _product(config: Config) -> float:
    return math.prod(size(config, each) for each in DIMENSIONS)


def _needed(config: Config) -> str:
    """The sizes whose product is too large or too small."""
    sizes = " · ".join(f"{each} {size(config, each):g}" for each in DIMENSIONS if size(config, each) != 1)
    return f"{sizes} = {_product(config):g}"


def _misses_processes(config: Config) -> bool:
    processes = config.number("num_processes")
    uneven = processes is not None and _product(config) != processes
    return uneven and _product(config) != 1 and size(config, "sp") == 1


def _sp_attention(config: Config) -> str:
    return str(config.get(key("sp_attn_implementation"), "sdpa"))


def _unknown_attention(config: Config) -> bool:
    name = _sp_attention(config)
    known = name in ("flash_attention_2", "flash_attention_3", "sdpa") or ("/" in name and "flash-attn" in name)
    return size(config, "sp") > 1 and not known


def _case(name: str, when: Callable[[Config], object], why: str | Callable[[Config], str], fix: str) -> Case[Config]:
    return Case("error", key(name), lambda c: _kind(c) and when(c), why, fix)


table(
    "accelerate",
    {
        Rule(
            "parallelism",
            "accelerate",
            "sizes of `parallelism_config` whose product is wrong, that leave FSDP nothing, or of another engine",
            "refused",
        ): (
            *(
                Case(
                    "error",
                    key(f"{each}_size"),
                    lambda c, each=each: _kind(c) and (size(c, each) < 1 or size(c, each) % 1),  # type: ignore[misc]
                    "not a size",
                    "use a whole number from 1 on",
                )
                for each in DIMENSIONS
            ),
            *(
                Case(
                    "error",
                    key(f"{each}_backend"),
                    lambda c, each=each, only=only: _kind(c) and c.get(key(f"{each}_backend"), only) != only,  # type: ignore[misc]
                    f"accelerate refuses every {each}_backend but {only}",
                    f"write {only}, or leave it out",
                )
                for each, only in _BACKENDS.items()
            ),
            _case(
                "cp_size",
                lambda c: size(c, "cp") > 1 and size(c, "sp") > 1,
                "context and sequence parallelism exclude each other",
                "keep cp_size under FSDP2, or sp_size under DeepSpeed",
            ),
            _case(
                "dp_replicate_size",
                lambda c: max(size(c, "tp"), size(c, "cp")) > 1 and size(c, "dp_replicate") > 1 == size(c, "dp_shard"),
                "replicas of models that tp or cp splits: accelerate refuses them without dp_shard_size",
                "use dp_shard_size instead of dp_replicate_size",
            ),
            _case(
                "sp_attn_implementation",
                _unknown_attention,
                lambda c: f"{_sp_attention(c)} is no attention for sequence parallelism",
                "use sdpa, flash_attention_2, flash_attention_3 or a kernel such as kernels-community/flash-attn2",
            ),
            _case(
                "cp_size",
                lambda c: size(c, "cp") > 1 and _kind(c) in ("MULTI", "FSDP1"),
                "context parallelism needs FSDP2, which shards the weights over the same ranks",
                "use distributed_type: FSDP with fsdp_version: 2",
            ),
            _case(
                "sp_size",
                lambda c: size(c, "sp") > 1 and _kind(c) != "DEEPSPEED",
                "sequence parallelism is DeepSpeed's: without it the Trainer stops, and your own loop splits nothing",
                "use distributed_type: DEEPSPEED, or cp_size under FSDP2",
            ),
            _case(
                "sp_size",
                lambda c: (
                    _kind(c) == "DEEPSPEED" and size(c, "sp") > 1 and (c.number("num_processes") or 0) % size(c, "sp")
                ),
                lambda c: f"{c.number('num_processes'):g} processes are no multiple of {size(c, 'sp'):g}",
                "use a divisor of the processes",
            ),
            _case(
                "",
                _misses_processes,
                lambda c: f"{_needed(c)}, and num_processes is {c.number('num_processes'):g}: accelerate refuses it",
                "the product of all sizes is the number of processes on all machines",
            ),
            _case(
                "",
                lambda c: _kind(c) == "FSDP2" and _product(c) > 1 == size(c, "dp_shard") * size(c, "cp"),
                "dp_shard_size and cp_size are 1: FSDP has nothing to shard over, and accelerate refuses it",
                "use a dp_shard_size above 1, or distributed_type: MULTI_GPU",
            ),
            _case(
                "",
                lambda c: _kind(c) not in ("FSDP2", "MULTI", "DEEPSPEED") and _product(c) > 1,
                lambda c: f"accelerate refuses it with {'fsdp_version: 1' if _kind(c) == 'FSDP1' else _kind(c)}",
                "use distributed_type: FSDP with fsdp_version: 2",
            ),
            # accelerate makes the ring of torch, and no engine that knows of it: its guide names FSDP2 alone.
            Case(
                "warning",
                key("cp_size"),
                lambda c: _kind(c) == "DEEPSPEED" and size(c, "cp") > 1,
                "accelerate's context parallelism is for FSDP2; DeepSpeed takes its ranks for data-parallel ones",
                "use sp_size under DeepSpeed",
            ),
        ),
    },
)

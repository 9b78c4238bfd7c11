"""The files that a configuration names: DeepSpeed's JSON and accelerate's YAML, as kit's fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kit.addons.configs.toml_entries import read_toml
from kit.addons.lint import named_file, read_values
from kit.addons.lint.config import Config
from kit.addons.lint.described import fsdp_stage
from kit.addons.lint.scripts import text_of
from kit.errors import SpecError
from kit.specs.layout import ZERO_KEYS
from kit.specs.strict_yaml import Document

_OFFLOADS = ("offload_optimizer", "offload_param")


def opener(path: Path) -> Callable[[str], Mapping[str, Any]]:
    """Reads the files that the one at ``path`` names, each once."""

    @cache
    def opened(named: str) -> Mapping[str, Any]:
        if (found := named_file(path, named)) is None:
            raise SpecError("the file is neither here nor above this one")
        if found.suffix == ".toml":
            return {key: entry.value for key, entry in read_toml(text_of(found), found.name).entries.items()}
        return read_values(found)

    return opened


def unopened(named: str) -> Mapping[str, Any]:
    """``opener``'s of a text that came from elsewhere, whose names are none of this machine's. Raises ``SpecError``."""
    raise SpecError("no file that a dropped one names is opened; kit plan FILE opens it, where both are")


def deepspeed_fields(
    value: Any, named: Mapping[str, Mapping[str, Any]], opened: Callable[[str], Mapping[str, Any]]
) -> dict[str, Any]:
    """Fields of a file, of its text, or of the name of one that the program brings. Sizes that are "auto" stay so."""
    text = str(value)
    name = text.rsplit("/", 1)[-1]
    if text.lstrip().startswith("{"):
        try:
            zero = json.loads(text).get("zero_optimization", {})
        except (ValueError, AttributeError):
            raise SpecError("no JSON") from None
    elif name in named:
        zero = named[name]
    else:
        zero = opened(text).get("zero_optimization", {})
    return of_zero(zero)


def of_zero(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``zero_optimization`` section."""
    fields: dict[str, Any] = {"layout.engine": "deepspeed", "layout.zero_stage": zero.get("stage", 0)}
    for offload in _OFFLOADS:
        fields[f"layout.{offload}"] = (zero.get(offload) or {}).get("device", "none")
    for name, key in ZERO_KEYS.items():
        plain = key.removeprefix("stage3_")
        found = zero.get(key, zero.get(plain))
        fields |= {f"layout.{name}": found} if found == "auto" or isinstance(found, int | float) else {}
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"):
        field = {"zero_hpz_partition_size": "zero_hpz"}.get(name, name)
        fields |= {f"layout.{field}": zero[name]} if zero.get(name) else {}
    return fields


def accelerate_fields(value: Any, opened: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of accelerate's YAML."""
    data = dict(opened(str(value)))
    config = Config(document=Document(str(value), data, {}))
    fields: dict[str, Any] = {} if (ranks := config.number("num_processes")) is None else {"world": int(ranks)}
    if config.get("mixed_precision") in ("bf16", "fp16"):
        fields["job.precision"] = config.get("mixed_precision")
    kind = config.get("distributed_type")
    if kind == "DEEPSPEED":
        section = config.section("deepspeed_config")
        if isinstance(named := section.get("deepspeed_config_file"), str):
            return fields | of_zero(opened(named).get("zero_optimization", {}))
        zero = {key.removeprefix("zero_"): each for key, each in section.items() if key == "zero_stage"}
        zero |= {name: {"device": section.get(f"{name}_device", "none")} for name in _OFFLOADS}
        return fields | of_zero(zero)
    if kind == "FSDP":
        stage = fsdp_stage(config)
        if stage is None:
            raise SpecError("kit does not have this sharding strategy")
        fields |= {"layout.engine": "torch", "layout.zero_stage": stage}
        if config.on("fsdp_config.fsdp_offload_params"):
            fields |= {"layout.offload_param": "cpu", "layout.offload_optimizer": "cpu"}
        if config.on("fsdp_config.fsdp_activation_checkpointing"):
            fields["layout.recompute"] = "full"
    return fields

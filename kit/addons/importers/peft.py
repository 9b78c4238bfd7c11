"""peft's adapters: their configuration as kit's, and the model that they belong to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.addons.importers.stored import StoredState, reader_errors
from kit.addons.importers.tensors import plain_name
from kit.cost.model.lora import named_layers
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.specs.text import shown

CONFIG = "adapter_config.json"


def adapter_config(directory: Path) -> dict[str, Any]:
    """Content of peft's ``adapter_config.json``. Raises CheckpointError."""
    path = directory / CONFIG
    with reader_errors(path, "peft"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def lora_of(path: Path, model: ModelSpec, state: StoredState) -> LoraSpec:
    """The adapters' rank, scale and layers by peft's configuration. Raises CheckpointError for what kit does not train:
    other kinds of adapters, or adapters on other layers."""
    config = adapter_config(path)
    with reader_errors(path / CONFIG, "peft"):
        other = "modules_to_save" if config.get("modules_to_save") else ""
        if config.get("peft_type") != "LORA" or other:
            raise CheckpointError(
                f"{path} has adapters of type {config.get('peft_type')} {other}, which kit does not train"
            )
        rank, alpha, dropout = int(config["r"]), float(config["lora_alpha"]), float(config.get("lora_dropout") or 0)
        kinds: dict[str, Any] = {key: config.get(key) is True for key in ("use_rslora", "use_dora")}
        patterns: dict[str, Any] = {key: dict(config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")}
        listed = sorted(map(str, config.get("target_modules") or []))
        lora = LoraSpec(rank=rank, alpha=alpha, dropout=dropout, **kinds, **patterns)
    if unknown := sorted(set().union(*patterns.values()) - named_layers(model).keys()):
        raise CheckpointError(f"{path} has a rank or alpha of {unknown[0]} alone, which kit does not train")
    names = {plain_name(name) for name in state.weights}
    choices: list[dict[str, Any]] = [{"targets": "attention"}, {"targets": "all-linear"}]
    if listed and set(listed) <= named_layers(model).keys():
        choices.append({"target_modules": tuple(listed)})
    for choice in choices:
        chosen = replace(lora, **choice)
        if names == checkpoint_shapes(model, chosen).keys():
            return chosen
    raise CheckpointError(
        f"{path} has adapters on {shown(config.get('target_modules'))}; kit's are on all layers of attention, on all "
        f"linear layers, or on a list of layers whose names it knows: merge these with peft's merge_and_unload"
    )

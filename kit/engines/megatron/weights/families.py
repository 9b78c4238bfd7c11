"""Finds the weight map of a model in the column ``megatron`` of its family (``kit/specs/families.py``)."""

from __future__ import annotations

from importlib import import_module

from kit.engines.megatron.weights.llama import llama
from kit.engines.megatron.weights.mapping import ParamMapping
from kit.errors import EngineError
from kit.specs.families import FAMILIES, families_where
from kit.specs.model import ModelSpec
from kit.specs.text import listed


def weight_map(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """The mappings of the model's family. Raises EngineError for a family without a map."""
    file, _, name = FAMILIES[model.family].megatron.partition(".")
    if not file:
        raise EngineError(
            f"family={model.family} of {model.name}: the Megatron engine has no weight map for it; "
            f"use engine torch or deepspeed, or one of the families {listed(families_where('megatron'))}"
        )
    found = getattr(import_module(f"{__package__}.{file}"), name)
    return llama(model, found) if isinstance(found, tuple) else found(model)

"""What a checkpoint of a run holds: the tensors that are trained."""

from __future__ import annotations

from kit.engines.hf import parameter_shapes
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


def checkpoint_shapes(model: ModelSpec, lora: LoraSpec | None) -> dict[str, tuple[int, ...]]:
    """Name → shape: all of the model, or of its adapters (by peft's names). Allocates nothing."""
    if lora is None:
        return parameter_shapes(model)
    from kit.engines.adapters import adapter_shapes  # imports peft

    return adapter_shapes(model, lora)

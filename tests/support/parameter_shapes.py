"""Shapes of a model's parameters."""

from __future__ import annotations

from kit.engines.huggingface.buffers import is_buffer
from kit.engines.huggingface.models import tensor_shapes
from kit.specs.model import ModelSpec


def parameter_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """``tensor_shapes`` without the buffers."""
    return {name: shape for name, shape in tensor_shapes(model).items() if not is_buffer(name)}

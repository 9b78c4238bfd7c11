"""Random initial weights that do not depend on the layout: each tensor has its own random stream."""

from __future__ import annotations

import hashlib

import torch

from kit.engines.huggingface.models import tensor_shapes
from kit.engines.protocol import GeneratedSource
from kit.specs.model import ModelSpec

INITIALIZER_RANGE = 0.02
"""Standard deviation of every matrix: transformers' ``initializer_range`` of all families with a weight map."""


class RandomSource(GeneratedSource):
    """Initial weights: norms with scale 1, biases 0, matrices normal with mean 0.

    megatron-core's own initialisation draws different numbers on every layout.
    """

    def __init__(self, model: ModelSpec, seed: int) -> None:
        super().__init__(tensor_shapes(model), seed)
        self._norm = 0.0 if model.traits.zero_centred_norm else 1.0

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, fp32, on the CPU; the same at every call."""
        shape = self._shapes[name]
        if len(shape) == 1 and not name.endswith(".sinks"):
            return torch.full(shape, 0.0 if name.endswith("bias") else self._norm)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.empty(shape).normal_(std=INITIALIZER_RANGE, generator=generator)

"""Native checkpoints: megatron-core's torch_dist format, for the same layout."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer


def save(directory: Path, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    raise NotImplementedError


def load(directory: Path, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    raise NotImplementedError

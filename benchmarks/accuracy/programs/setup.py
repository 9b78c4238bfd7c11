"""A published run: kit's terms, and what only other programs have."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.memory.rank_states import EngineMemory
from kit.cost.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True)
class PublishedSetup(TrainingSetup):
    """One published run."""

    engine: EngineMemory | None = None
    """What DeepSpeed held; null for all others, whose states follow from the widths."""
    optimizer_instances: int = 1
    """Megatron: replicas of a sharded optimizer state (``--num-distributed-optimizer-instances``)."""
    optimizer_bytes: float = 12.0
    """Master weights where they are a copy, and optimizer state, per parameter."""
    matrix_optimizer_bytes: float | None = None
    """Where matrices of the layers are treated otherwise (Muon keeps one moment); null = as all."""
    optimizer_offload: float = 0.0
    """Fraction of optimizer state that lives in host memory."""
    optimizer_in_backward: bool = False
    compiled: bool = False
    """torch.compile of the layers."""
    gathers_again: bool = True
    """With sequence parallelism: whether backward gathers inputs of matrix products again, or forward keeps them."""

"""Who holds a parameter: the ranks it is cut over, those with the same part, and the one that speaks for it.

Ranks are numbered with tensor parallelism fastest and the pipeline slowest. Dense parameters see the rest as
cp, dp; experts as ep, expert data parallelism (megatron-core, parallel_state.py, order "tp-cp-ep-dp-pp").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from kit.engines.base import StateKind
from kit.engines.megatron.state import LocalState
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


class ShardState(Protocol):
    """The state of this rank's tensor-parallel shards, whoever shares it out further."""

    def get(self, kind: StateKind, param: torch.nn.Parameter) -> torch.Tensor:
        """fp32, shape of the shard, the same on all data-parallel ranks, which call it together."""

    def set(self, kind: StateKind, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """From a tensor of the shape of the shard."""


@dataclass(frozen=True)
class Place:
    """One way of holding parameters, seen from this rank."""

    tensor: dist.ProcessGroup
    """Ranks over which each parameter is cut."""
    data: dist.ProcessGroup
    """Ranks that hold the same part."""
    state: ShardState
    owner: Callable[[int, int | None], int]
    """(pipeline stage, expert) → global rank that joins the parts: first of both groups."""


def places(model: ModelSpec, layout: Layout, optimizer: ChainedOptimizer) -> tuple[Place, Place]:
    """For dense parameters, and for experts: the same without expert parallelism."""
    per_stage = layout.world_size // layout.pp
    first, *rest = optimizer.chained_optimizers
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    dense = Place(tensor, data, LocalState(first, data), lambda stage, _: stage * per_stage)
    if not rest:
        return dense, dense
    (second,) = rest
    data = parallel_state.get_expert_data_parallel_group()
    per_rank = model.num_experts // layout.ep

    def owner(stage: int, expert: int | None) -> int:
        assert expert is not None
        return stage * per_stage + expert // per_rank * layout.etp

    return dense, Place(parallel_state.get_expert_tensor_parallel_group(), data, LocalState(second, data), owner)

"""The process groups that split a parameter, and that replicate each slice.

Experts have other groups than the rest of a layer (megatron-core, parallel_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from kit.engines.megatron.resharding.optimizer_state import LocalState, ShardState
from kit.engines.protocol import StateKind


@dataclass(frozen=True)
class ShardGroups:
    """The groups and the state of this rank's shards, for dense parameters or for experts."""

    tensor: dist.ProcessGroup
    """Ranks that split each parameter."""
    data: dist.ProcessGroup
    """Ranks with equal slices."""
    state: ShardState


def shard_groups(optimizer: ChainedOptimizer) -> tuple[ShardGroups, ShardGroups]:
    """(groups of dense parameters, groups of experts); equal without expert parallelism, where megatron-core steps both
    by the same optimizers."""
    of_experts = [each for each in optimizer.chained_optimizers if each.param_groups[0]["is_expert_parallel"]]
    others = [each for each in optimizer.chained_optimizers if each not in of_experts]
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dense = ShardGroups(parallel_state.get_tensor_model_parallel_group(), data, LocalState(others, data))
    if not of_experts:
        return dense, dense
    data = parallel_state.get_expert_data_parallel_group()
    return dense, ShardGroups(parallel_state.get_expert_tensor_parallel_group(), data, LocalState(of_experts, data))


def frozen_groups() -> tuple[ShardGroups, ShardGroups]:
    """(groups of dense parameters, groups of experts) of a model without trained weights."""
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    return (
        ShardGroups(parallel_state.get_tensor_model_parallel_group(), data, BufferState(data)),
        ShardGroups(parallel_state.get_expert_tensor_parallel_group(), of_experts, BufferState(of_experts)),
    )


class BufferState(ShardState):
    """``ShardState`` of a frozen weight, or of a buffer that is saved with the weights: without optimizer state.

    MASTER is the tensor itself; gradient and moments are zero.
    """

    def __init__(self, data: dist.ProcessGroup) -> None:
        self._data = data

    def own(self, kind: StateKind, param: torch.Tensor) -> tuple[int, torch.Tensor]:
        """(start, values): the first data-parallel rank has the whole buffer, other ranks an empty range."""
        return 0, _value(kind, param) if self._data.rank() == 0 else _value(kind, param)[:0]

    def targets(self, kind: StateKind, param: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
        """The tensor for MASTER only: a buffer has no moments to set."""
        return [(0, param.detach().view(-1))] if kind is StateKind.MASTER else []


def _value(kind: StateKind, param: torch.Tensor) -> torch.Tensor:
    value = param.detach().float()
    return value if kind is StateKind.MASTER else torch.zeros_like(value)

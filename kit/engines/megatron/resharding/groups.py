"""Who holds a parameter: the ranks it is cut over, and those with the same part.

Experts are cut over, and repeated on, other ranks than the rest of a layer (megatron-core, parallel_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from kit.engines.base import StateKind, place
from kit.engines.megatron.resharding.optimizer_state import LocalState, ShardState


@dataclass(frozen=True)
class ShardGroups:
    """One way of holding parameters, seen from this rank."""

    tensor: dist.ProcessGroup
    """Ranks over which each parameter is cut."""
    data: dist.ProcessGroup
    """Ranks that hold the same part."""
    state: ShardState


def shard_groups(optimizer: ChainedOptimizer) -> tuple[ShardGroups, ShardGroups]:
    """For dense parameters, and for experts: the same without expert parallelism."""
    first, *rest = optimizer.chained_optimizers
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dense = ShardGroups(parallel_state.get_tensor_model_parallel_group(), data, LocalState(first, data))
    if not rest:
        return dense, dense
    (second,) = rest
    data = parallel_state.get_expert_data_parallel_group()
    return dense, ShardGroups(parallel_state.get_expert_tensor_parallel_group(), data, LocalState(second, data))


class BufferState(ShardState):
    """``ShardState`` of a buffer that belongs to the weights: no optimizer knows it, and every rank has all of it.

    Its master is the buffer itself, its gradient and moments are zero.
    """

    def __init__(self, data: dist.ProcessGroup) -> None:
        self._data = data

    def own(self, kind: StateKind, param: torch.Tensor) -> tuple[int, torch.Tensor]:
        """This rank's part (``ShardState``): the first data-parallel rank has all of it, the others an empty range."""
        return 0, _value(kind, param) if self._data.rank() == 0 else _value(kind, param)[:0]

    def wants(self, kind: StateKind, param: torch.Tensor) -> bool:
        """Only the value is kept, no gradient and no moments."""
        return kind is StateKind.MASTER

    @torch.no_grad()
    def put(self, kind: StateKind, param: torch.Tensor, row: int, column: int, block: torch.Tensor) -> None:
        assert kind is StateKind.MASTER
        place(param, row, column, block)


def _value(kind: StateKind, param: torch.Tensor) -> torch.Tensor:
    value = param.detach().float()
    return value if kind is StateKind.MASTER else torch.zeros_like(value)

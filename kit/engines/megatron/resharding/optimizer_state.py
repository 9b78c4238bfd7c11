"""Finds each kind of state of one parameter in megatron-core, and gets and sets parts of this rank's shard.

Three places, by optimizer: with fp32 parameters the parameter is its own master; in bf16 a fp32 ``main_param`` is
beside it; the distributed optimizer cuts the flat parameter (master, moments and reduced gradient) over the
data-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from kit.engines.base import StateKind
from kit.engines.megatron.optimizer import Adam
from kit.engines.megatron.resharding.p2p import P2PSender, receive


class ShardState(ABC):
    """The state of this rank's tensor-parallel shards, whoever splits it further."""

    def shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return tuple(param.shape)

    @abstractmethod
    def own(self, kind: StateKind, param: Any) -> tuple[int, torch.Tensor]:
        """(start, values) of a range of the flattened shard; the ranges of the data-parallel ranks cover it.

        ``values``: one dimension, any dtype."""

    def wants(self, kind: StateKind, param: Any) -> bool:
        """Whether this rank keeps any of it."""
        return True

    @abstractmethod
    def put(self, kind: StateKind, param: Any, dim: int, at: int, block: torch.Tensor) -> None:
        """Set rows (``dim`` 0) or columns (1) of the shard from ``at`` on.

        ``block``: any dtype, the shard's shape but for ``dim``. Blocks cover the shard, each element once.
        """


class LocalState(ShardState):
    """The state of some of this rank's parameters; collective over the ranks that hold the same ones.

    megatron-core has one optimizer for all parameters, or with expert parallelism two: experts have data-parallel
    ranks of their own.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        data_parallel_group: dist.ProcessGroup,
        params: Sequence[torch.nn.Parameter],
    ) -> None:
        """Collective over the group. ``params``: those of this optimizer, in the same order on all of its ranks."""
        self._optimizer = optimizer
        self._group = data_parallel_group
        self._ranges: dict[torch.nn.Parameter, list[tuple[int, int]]] = {}
        if self._distributed:
            everyone: list[list[tuple[int, int]]] = [[]] * data_parallel_group.size()
            dist.all_gather_object(everyone, [self._range(p) for p in params], group=data_parallel_group)
            self._ranges = dict(zip(params, (list(each) for each in zip(*everyone, strict=True)), strict=True))

    @property
    def adam(self) -> Adam:
        """The inner optimizer."""
        return self._optimizer.optimizer

    @property
    def _distributed(self) -> bool:
        """Whether the data-parallel ranks share one copy of the state."""
        return isinstance(self._optimizer, DistributedOptimizer)

    @torch.no_grad()
    def collect(self, kind: StateKind, param: torch.nn.Parameter, to: int, sender: P2PSender) -> torch.Tensor | None:
        """Collective over the group: fp32, the shape of ``param``, on its rank ``to``; None on the other ranks.

        It may be the state itself: do not change it.
        """
        start, end = self._range(param) if self._distributed else (0, param.numel())
        part = self._own(kind, param) if start < end else None
        if not self._distributed:
            assert part is not None
            return part.detach().float() if self._group.rank() == to else None
        if self._group.rank() != to:
            if part is not None:
                sender.send(part, dist.get_global_rank(self._group, to))
            return None
        whole = torch.empty(param.shape, dtype=torch.float32, device=param.device)
        flat = whole.view(-1)
        for rank, (lower, upper) in enumerate(self._ranges[param]):
            if rank == to and part is not None:
                flat[lower:upper].copy_(part)
            elif lower < upper:
                receive(flat[lower:upper], dist.get_global_rank(self._group, rank))
        return whole

    def own(self, kind: StateKind, param: torch.nn.Parameter) -> tuple[int, torch.Tensor]:
        """(start, values) of a range of the flattened shard; those of the group's ranks cover it. Not collective."""
        if self._distributed:
            start, end = self._range(param)
            if start == end:
                return 0, param.detach().view(-1)[:0]
            return start, self._own(kind, param).detach().view(-1)
        width, size, rank = param.numel() // param.shape[0], self._group.size(), self._group.rank()
        start, end = (param.shape[0] * each // size * width for each in (rank, rank + 1))
        return start, self._own(kind, param).detach().reshape(-1)[start:end]

    def wants(self, kind: StateKind, param: torch.nn.Parameter) -> bool:
        """Whether this rank keeps any of it."""
        return kind is StateKind.MASTER or self._main(param) is not None

    @torch.no_grad()
    def put(self, kind: StateKind, param: torch.nn.Parameter, dim: int, at: int, block: torch.Tensor) -> None:
        """Set rows (``dim`` 0) or columns (1) of a kind of state (not GRADIENT) from ``at`` on; any dtype."""
        assert kind is not StateKind.GRADIENT
        if kind is StateKind.MASTER:
            param.narrow(dim, at, block.shape[dim]).copy_(block)
        main = self._main(param)
        if main is None or (kind is StateKind.MASTER and _is_part(main, param)):
            return
        held = main if kind is StateKind.MASTER else self._moments(main)[kind.value]
        if not self._distributed:
            held.narrow(dim, at, block.shape[dim]).copy_(block)
            return
        width = param.numel() // param.shape[0]
        as_rows = block.view(-1, 1) if param.ndim == 1 else block.flatten(1)
        row, column = (at, 0) if dim == 0 else (0, at)
        _copy_into_range(held, self._range(param)[0], width, as_rows, row, column)

    def _own(self, kind: StateKind, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's part: of the shard's shape, or flat where ranks split it (then it is not empty)."""
        if kind is StateKind.GRADIENT:
            gradient = param.main_grad  # type: ignore[attr-defined] # set by megatron-core
            return gradient.flatten()[slice(*self._range(param))] if self._distributed else gradient
        main = self._main(param)
        assert main is not None
        return (main if kind is StateKind.MASTER else self._moments(main)[kind.value]).detach()

    def _main(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """What Adam steps for ``param``: all of it, a flat part, or None where other ranks hold every part."""
        if not self._distributed:
            return getattr(param, "main_param", param)
        if param not in self._optimizer.model_param_group_index_map:
            return None
        group, index = self._optimizer.model_param_group_index_map[param]
        return self.adam.param_groups[group]["params"][index]

    def _range(self, param: torch.nn.Parameter) -> tuple[int, int]:
        if param not in self._optimizer.model_param_group_index_map:
            return 0, 0
        found = self._optimizer._get_model_param_range_map(param)["param"]
        return found.start, found.end

    def _moments(self, main: torch.Tensor) -> dict[str, Any]:
        self.adam.initialize(main)
        return self.adam.state[main]

    def held_bytes(self) -> int:
        """Bytes of master weights that are not the parameters themselves, and of moments."""
        held = {tensor for state in self.adam.state.values() for tensor in state.values()}
        if self._optimizer.config.bf16:
            held |= {param for group in self.adam.param_groups for param in group["params"]}
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _is_part(main: torch.Tensor, param: torch.nn.Parameter) -> bool:
    """Whether the master of a parameter is the parameter itself, or a view of it, as in fp32."""
    return main.untyped_storage().data_ptr() == param.untyped_storage().data_ptr() and main.dtype == param.dtype


def _copy_into_range(held: torch.Tensor, start: int, width: int, block: torch.Tensor, row: int, column: int) -> None:
    """Copy what ``block``, at (row, column) of a matrix of this width, has in common with a flat range of it.

    ``held``: elements ``start`` … of the flattened matrix. Whole rows of the range are one copy; the rows that it
    cuts in two are one each.
    """
    end = start + held.numel()
    first, last = -(-start // width), end // width  # whole rows of the range
    cut = {index for index in (start // width, last) if not first <= index < last}
    lower, upper = max(first, row), min(last, row + block.shape[0])
    if lower < upper:
        rows = held[lower * width - start : upper * width - start].view(-1, width)
        rows[:, column : column + block.shape[1]].copy_(block[lower - row : upper - row])
    for index in cut:
        if not row <= index < row + block.shape[0]:
            continue
        left = max(start, index * width + column)
        right = min(end, index * width + column + block.shape[1])
        if left < right:
            offset = index * width + column
            held[left - start : right - start].copy_(block[index - row, left - offset : right - offset])

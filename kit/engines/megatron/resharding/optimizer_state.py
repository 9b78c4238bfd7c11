"""Reads and sets each kind of state of one parameter in megatron-core's optimizers.

The master weight depends on the optimizer. With fp32 parameters it is the parameter. In bf16 it is ``main_param``, an
fp32 tensor. The distributed optimizer splits the flat parameter (master weight, moments and reduced gradient) over the
data-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from kit.engines.megatron.optimizer import inner_optimizers, inner_parameter
from kit.engines.moments import live_moment
from kit.engines.protocol import StateKind


class ShardState(ABC):
    """The state of this rank's tensor-parallel shards. Data-parallel ranks may split it further."""

    def shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """Shape of this rank's tensor-parallel shard of ``param``."""
        return tuple(param.shape)

    @abstractmethod
    def own(self, kind: StateKind, param: Any) -> tuple[int, torch.Tensor]:
        """This rank's range of the flattened shard: (start, values). The ranges of the data-parallel ranks cover the
        shard.

        ``values``: one dimension, any dtype."""

    @abstractmethod
    def targets(self, kind: StateKind, param: Any) -> Iterable[tuple[int, torch.Tensor]]:
        """The ranges of the flattened shard that this rank has: (start, values) of each, to be filled, and then given
        to ``put``. Empty if only other ranks have some of it."""

    def put(self, kind: StateKind, param: Any, values: torch.Tensor) -> None:  # noqa: B027 (most values are live)
        """Set what is not live of a range of ``targets``, whose values have been filled."""


class LocalState(ShardState):
    """The state of the parameters of megatron-core's optimizers for one group of data-parallel ranks. Not collective.

    There is one optimizer, or with Muon one for matrices and one for the rest.
    """

    def __init__(self, optimizers: Sequence[MegatronOptimizer], data_parallel_group: dist.ProcessGroup) -> None:
        self._optimizer, self._group = optimizers[0], data_parallel_group
        self._inner = [inner for each in optimizers for inner in inner_optimizers(each.optimizer)]
        self._stepped_by = {
            main: each for each in self._inner for group in each.param_groups for main in group["params"]
        }

    @property
    def _distributed(self) -> bool:
        """Whether this is the distributed optimizer, which splits the state over the data-parallel ranks."""
        return isinstance(self._optimizer, DistributedOptimizer)

    def own(self, kind: StateKind, param: torch.nn.Parameter) -> tuple[int, torch.Tensor]:
        """This rank's range of the flattened shard: (start, values)."""
        start, end = self._range(param)
        if start == end:
            return 0, param.detach().view(-1)[:0]
        if kind is StateKind.GRADIENT:
            held: torch.Tensor = param.main_grad  # type: ignore[attr-defined] # set by megatron-core
        else:
            main = self._main(param)
            assert main is not None
            held = main if kind is StateKind.MASTER else self._moment(main, kind)
        flat = held.detach().reshape(-1)
        return start, flat if flat.numel() == end - start else flat[start:end]

    def targets(self, kind: StateKind, param: torch.nn.Parameter) -> Iterator[tuple[int, torch.Tensor]]:
        """For MASTER also the parameter itself, whose master weights other ranks may have."""
        if kind is StateKind.MASTER:
            yield 0, param.detach().view(-1)
        if (main := self._main(param)) is not None:
            held = main if kind is StateKind.MASTER else self._moment(main, kind)
            yield self._range(param)[0] if self._distributed else 0, held.detach().view(-1)

    def _main(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """The tensor that is stepped for ``param``: whole or a flat part; None if only other ranks have parts."""
        if not self._distributed:
            return getattr(param, "main_param", param)
        if param not in self._optimizer.model_param_group_index_map:
            return None
        group, index = self._optimizer.model_param_group_index_map[param]
        optimizer = self._optimizer.optimizer
        return inner_parameter(optimizer, optimizer.param_groups[group]["params"][index])

    def _range(self, param: torch.nn.Parameter) -> tuple[int, int]:
        """(start, end) of this rank's range of the flattened shard. Without the distributed optimizer every rank has
        the whole state, and the ranges have equal numbers of rows."""
        if not self._distributed:
            width, size, rank = param.numel() // param.shape[0], self._group.size(), self._group.rank()
            return param.shape[0] * rank // size * width, param.shape[0] * (rank + 1) // size * width
        if param not in self._optimizer.model_param_group_index_map:
            return 0, 0
        found = self._optimizer._get_model_param_range_map(param)["param"]
        return found.start, found.end

    def _moment(self, main: torch.Tensor, kind: StateKind) -> torch.Tensor:
        """A moment of one master weight; zeros if the optimizer does not have it."""
        inner = self._stepped_by[main]
        if not inner.state[main]:
            inner.initialize(main)
        return live_moment(inner.state[main], kind, main)

    def memory_bytes(self) -> int:
        """Bytes of moments, and of master weights that are not the parameters themselves."""
        held = {tensor for each in self._inner for state in each.state.values() for tensor in state.values()}
        if self._optimizer.config.bf16:
            held |= self._stepped_by.keys()
        return sum(tensor.nbytes for tensor in held)

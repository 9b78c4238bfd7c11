"""The state of buffers that belong to the weights: no optimizer knows them, and every rank has them whole."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kit.engines.base import StateKind


class BufferState:
    """``ShardState`` of a buffer: its master is itself, its gradient and moments are zero."""

    def __init__(self, data: dist.ProcessGroup) -> None:
        self._data = data

    def shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """Of the buffer."""
        return tuple(param.shape)

    def own(self, kind: StateKind, param: torch.Tensor) -> tuple[int, torch.Tensor]:
        """See ``LocalState``: the first rank has all of it to give."""
        return 0, _value(kind, param) if self._data.rank() == 0 else _value(kind, param)[:0]

    def wants(self, kind: StateKind, param: torch.Tensor) -> bool:
        """Its value alone."""
        return kind is StateKind.MASTER

    @torch.no_grad()
    def put(self, kind: StateKind, param: torch.Tensor, dim: int, at: int, block: torch.Tensor) -> None:
        """Set a part of it."""
        assert kind is StateKind.MASTER
        param.narrow(dim, at, block.shape[dim]).copy_(block)


def _value(kind: StateKind, param: torch.Tensor) -> torch.Tensor:
    value = param.detach().float()
    return value if kind is StateKind.MASTER else torch.zeros_like(value)

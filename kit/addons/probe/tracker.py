"""Counts the bytes of live tensor storages at dispatch, by torch's MemTracker.

A storage counts from the operator that creates it until no tensor refers to it. A CUDA allocator would allocate the
same bytes, apart from rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_COUNTED = set(_MemRefType) - {_MemRefType.PARAM}
"""Kinds of storages that count; one that is left out has the other kind."""


class LiveBytes(MemTracker):
    """Live bytes now, and their peak since ``restart``; without storages given to ``leave_out``."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.masked_select_size: Callable[[torch.Tensor], int] | None = None
        """Elements that a mask selects, which no fake tensor knows."""

    @property
    def now(self) -> int:
        """Bytes of the live storages that are not left out."""
        return sum(size for held in self._curr_mem_snap.values() for kind, size in held.items() if kind in _COUNTED)

    def __enter__(self) -> LiveBytes:
        # Without MemTracker's hooks on modules, which attribute memory to them and keep outputs alive to do so.
        self._fake_mode_on_entry = active_fake_mode()
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # Code reads a number from a fake tensor (a loss, a norm, a flag): any value gives the same memory.
            return 1.0 if args[0].dtype.is_floating_point else args[0].dtype != torch.bool
        if func is aten.equal.default and not any(issubclass(kind, DTensor) for kind in types):
            return True
        if func is aten.masked_select.default and self.masked_select_size is not None:
            func, args = aten.new_empty.default, (args[0], [self.masked_select_size(args[1])])
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stops counting these storages: weights, gradients and optimizer state, which are counted separately."""
        for tensor in tensors:
            self._update_and_maybe_create_winfos(tensor, _MemRefType.PARAM)

    def _update_peak_stats(self, peak_state: Any) -> None:
        self.peak = max(self.peak, self.now)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

"""Counts the bytes of live tensor storages at dispatch.

As in torch's MemTracker (torch/distributed/_tools/mem_tracker.py), a storage counts from the operator that creates it
until no tensor refers to it. A CUDA allocator would allocate the same bytes, apart from rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Live bytes now, and their peak since ``restart``; without storages given to ``leave_out``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._left_out: set[int] = set()
        self.masked_select_size: Callable[[torch.Tensor], int] | None = None
        """Elements that a mask selects, which no fake tensor knows."""

    def __enter__(self) -> LiveBytes:
        self._resize = torch.UntypedStorage.resize_
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 frees gathered weights by resizing their storage to 0, which is not an operator.
            result = tracker._resize(storage, size)
            tracker._change(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # Code reads a number from a fake tensor (a loss, a norm, a flag): any value gives the same memory.
            return 1.0 if args[0].dtype.is_floating_point else args[0].dtype != torch.bool
        if any(issubclass(kind, DTensor) for kind in types):
            # A DTensor reports the storage size of the whole tensor but has none: count its local tensors instead.
            return NotImplemented
        if func is aten.equal.default:
            return True
        if func is aten.masked_select.default and self.masked_select_size is not None:
            result = args[0].new_empty(self.masked_select_size(args[1]))
        else:
            result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return result

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stops counting these storages: weights, gradients and optimizer state, which are counted separately."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._see(storage)
            key = storage._cdata
            if key in self._sizes and key not in self._left_out:
                self.now -= self._sizes[key]
                self._left_out.add(key)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _change(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._see(storage)
            return
        if key not in self._left_out:
            self.now += storage.nbytes() - self._sizes[key]
            self.peak = max(self.peak, self.now)
        self._sizes[key] = storage.nbytes()

    def _gone(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        self._alive.pop(key, None)
        if key in self._left_out:
            self._left_out.discard(key)
        else:
            self.now -= size


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())

"""What autograd keeps of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def saved_bytes(compute: Callable[[], torch.Tensor], counts: Callable[[torch.Tensor], bool]) -> int:
    """Bytes of storage behind the tensors of ``compute`` that are saved for backward and that count. They live until
    they are added up, or their addresses would be used again."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if counts(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = compute()
    assert output.grad_fn is not None
    return sum(storage.nbytes() for storage in kept.values())


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Their addresses."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}

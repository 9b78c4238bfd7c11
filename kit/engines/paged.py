"""Moments in CUDA's managed memory, whose pages the driver moves to the host when the GPU is full: bitsandbytes'
``get_paged``. Never run on a GPU.

torch takes such a tensor for one of the CPU; bitsandbytes' kernels read it on the GPU by the mark ``is_paged``. It is
never freed, so a second engine in a process holds both.
"""

from __future__ import annotations

import torch

from kit.errors import EngineError


def paged_zeros(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of the shape of ``like``, for kernels on its device. Raises EngineError on a CPU."""
    import bitsandbytes.functional as F

    if like.device.type != "cuda":
        raise EngineError(
            "layout.paged_optimizer=true on a CPU, where bitsandbytes warns and does not page; use false, or a GPU"
        )
    if not like.numel():  # an empty shard; CUDA has no managed memory of no bytes
        return torch.zeros(like.shape, dtype=dtype)
    paged = F.get_paged(*like.shape, dtype=dtype, device=like.device)
    F.fill(paged, 0)
    return paged


def part_of(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    """A slice of the flattened tensor, which keeps bitsandbytes' mark."""
    piece = tensor.view(-1)[part]
    if is_paged(tensor):
        piece.is_paged = True  # type: ignore[attr-defined]
    return piece


def prefetch(*tensors: torch.Tensor | None) -> None:
    """Ask the driver for the pages that the next kernel reads, as bitsandbytes does. Does not wait."""
    import bitsandbytes.functional as F

    for tensor in tensors:
        if tensor is not None and is_paged(tensor):
            F.prefetch_tensor(tensor)


def is_paged(tensor: torch.Tensor) -> bool:
    """Whether ``paged_zeros`` made it."""
    return getattr(tensor, "is_paged", False)

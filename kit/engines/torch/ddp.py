"""Every rank holds everything: one device, or DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kit.engines.torch.compression import Compression


class DdpModel:
    """Parameters, gradients and moments on every rank; gradients averaged by DDP while backward runs."""

    local_state_differs = False
    """Whether a native checkpoint needs the tensors of every rank."""

    tokens_group: dist.ProcessGroup | None = None
    """Ranks whose micro batches make up the step: all."""

    def __init__(self, model: torch.nn.Module, dp_size: int, compression: Compression) -> None:
        self.dp_rank, self.dp_size = dist.get_rank(), dp_size
        self._model = model
        self._ddp = _wrap(model) if dp_size > 1 else None
        self._compression = compression
        if self._ddp is not None:
            compression.install(self._ddp)

    def resume_at(self, steps: int) -> None:
        """The run goes on after so many optimizer steps."""
        self._compression.resume_at(steps)

    def forward(self, arguments: dict[str, Any], training: bool) -> torch.Tensor:
        """Logits. Evaluation goes around DDP, which has nothing to do there."""
        module = self._ddp if training and self._ddp is not None else self._model
        return module(**arguments).logits

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """DDP all-reduces in every backward whose forward was not under no_sync; one all-reduce a step is enough."""
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Of all gradients."""
        return torch.nn.utils.get_total_norm(gradients)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor."""
        return tensor

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank holds of it."""
        return tensor

    def fill(self, target: torch.Tensor, full: torch.Tensor) -> None:
        """Set ``target`` from the whole tensor."""
        target.copy_(full)


def _wrap(model: torch.nn.Module) -> DistributedDataParallel:
    device = next(model.parameters()).device
    # Buffers are RoPE frequencies, the same everywhere; gradients live in the buckets instead of beside them.
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )

"""One device, or DistributedDataParallel (DDP) with optional compression of gradients: every rank has all state."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from kit.cost.collectives import POWERSGD_RANK
from kit.engines.torch.fsdp import norm_in_fp32
from kit.specs.layout import GradientCompression

_LATEST_START = 1000
"""Largest number of first steps without compression; torch's default."""
_FIRST_START = 2
"""Smallest number: DDP rebuilds its buckets after the first step, and PowerSGD's errors are per bucket (PowerSGDState
requires it)."""


@dataclass
class Compression:
    """The communication hook of one DDP module, for a run of ``total_steps``."""

    kind: GradientCompression
    total_steps: int
    _state: PowerSGDState | None = field(default=None, init=False)

    def install(self, ddp: DistributedDataParallel) -> None:
        """Register the hook. Call this once, before the first forward pass."""
        if self.kind == "bf16":
            ddp.register_comm_hook(ddp.process_group, _bf16)
        elif self.kind == "powersgd":
            logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").setLevel(logging.WARNING)
            self._state = PowerSGDState(
                ddp.process_group,
                matrix_approximation_rank=POWERSGD_RANK,
                start_powerSGD_iter=self.start_after(0),
                # Avoids a division by zero for columns of a zero gradient (unused tokens).
                orthogonalization_epsilon=1e-8,
            )
            ddp.register_comm_hook(self._state, powerSGD_hook)

    def resume_at(self, steps: int) -> None:
        """Resume after ``steps`` steps. PowerSGD's error feedback of the last step is lost."""
        if self._state is not None:
            self._state.start_powerSGD_iter = self.start_after(steps)

    def start_after(self, steps: int) -> int:
        """Number of steps without compression after ``steps`` steps: the rest of the run's first tenth, because early
        gradients are sensitive to compression (documentation of PowerSGDState)."""
        return max(_FIRST_START, min(_LATEST_START, self.total_steps // 10) - steps)


def _bf16(group, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with classes: ours are strings
    """torch's ``bf16_compress_hook`` under another name: DDP refuses torch's name without NCCL, but gloo also sums
    bf16."""
    return bf16_compress_hook(group, bucket)


class DdpModel:
    """Every rank has all parameters, gradients and moments. DDP averages gradients while backward runs."""

    tokens_group: dist.ProcessGroup | None = None
    """Ranks whose micro batches make up the step: all."""

    def __init__(self, model: torch.nn.Module, dp_size: int, compression: Compression) -> None:
        self.dp_rank, self.dp_size = dist.get_rank(), dp_size
        self.averaged_over = dp_size
        self._model = model
        self._ddp = _wrap(model) if dp_size > 1 else None
        if self._ddp is not None:
            compression.install(self._ddp)

    def module(self, training: bool) -> torch.nn.Module:
        """The module to call: DDP in training, the bare model in evaluation."""
        return self._ddp if training and self._ddp is not None else self._model

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro batch's forward and backward. All but the last run under ``no_sync``, so that DDP
        all-reduces once per step."""
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """L2 norm of all gradients: a scalar on the device."""
        return norm_in_fp32([*gradients])


def _wrap(model: torch.nn.Module) -> DistributedDataParallel:
    device = next(model.parameters()).device
    # Buffers are RoPE frequencies, equal on all ranks; torch 2.13 has another word for leaving them alone. Gradients
    # are views of DDP's buckets: there is no second copy.
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    alone: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **alone)

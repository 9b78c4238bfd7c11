"""DDP's gradients rounded to bf16, or sent as factors of low rank: torch's own communication hooks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from kit.cost.model.compression import POWERSGD_RANK
from kit.specs.layout import GradientCompression

LATEST_START = 1000
"""Steps without compression at the most; torch's default."""
FIRST_START = 2
"""DDP makes its buckets anew after the first step, and errors belong to buckets (PowerSGDState's own limit)."""


@dataclass
class Compression:
    """A hook of one DDP module, for a run of ``total_steps``."""

    kind: GradientCompression
    total_steps: int
    _state: PowerSGDState | None = field(default=None, init=False)

    def install(self, ddp: DistributedDataParallel) -> None:
        """Once, before the first forward pass."""
        if self.kind == "bf16":
            ddp.register_comm_hook(ddp.process_group, _bf16)
        elif self.kind == "powersgd":
            logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").setLevel(logging.WARNING)
            self._state = PowerSGDState(
                ddp.process_group,
                matrix_approximation_rank=POWERSGD_RANK,
                start_powerSGD_iter=self.start_after(0),
                # Columns of a gradient that is zero (unused tokens) are divided by their length.
                orthogonalization_epsilon=1e-8,
            )
            ddp.register_comm_hook(self._state, powerSGD_hook)

    def resume_at(self, steps: int) -> None:
        """Tell it where a run goes on. Errors that were to be fed back are lost: what one step had rounded away."""
        if self._state is not None:
            self._state.start_powerSGD_iter = self.start_after(steps)

    def start_after(self, steps: int) -> int:
        """Uncompressed steps still to come: a tenth of the run in all, for early gradients are the sensitive ones (the
        documentation of PowerSGDState), less those that were done."""
        start = min(LATEST_START, self.total_steps // 10)
        return max(FIRST_START, start - steps)


def _bf16(group, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with classes: ours are strings
    """torch's hook under a name of ours: DDP refuses that name without NCCL, and gloo sums bf16 as well."""
    return bf16_compress_hook(group, bucket)

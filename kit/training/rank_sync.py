"""What ranks must agree on every step: one small all-reduce on the host, which runs beside the optimizer.

A GPU is never waited for: the values are the host's own, sent over gloo when backward is done and read after the
optimizer. Every rank reads the same result, so what follows from it (to stop after this step) is agreed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class StatusAllReduce:
    """The largest of a few values over all ranks. Made once a run, by all ranks together."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self._values: list[float] = []
        self._sent: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, values: Sequence[float]) -> None:
        """Begin to send this rank's values."""
        self._values = list(values)
        if self._group is not None:
            self._sent = torch.tensor(self._values, dtype=torch.float64)
            self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def max(self) -> list[float]:
        """The largest of each value over all ranks; waits for the slowest."""
        if self._work is not None and self._sent is not None:
            self._work.wait()
            self._work, self._values = None, self._sent.tolist()
        return self._values

"""Point-to-point sends that need not be received yet, so that a rank can go on with its own work."""

from __future__ import annotations

import torch
import torch.distributed as dist

_MESSAGE_BYTES = 32 * 2**20


class P2PSender:
    """Sends in flight.

    Nothing waits in a circle as long as all ranks go through their tensors in the same order and a tensor's receiver
    takes all of it before it goes on: whoever waits for a send waits for a rank that is further behind.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, flat: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor of one dimension and any dtype to a global rank; it must not change before
        ``wait``."""
        self._pending += [(dist.isend(message, dst=to), message) for message in _messages(flat)]

    def wait(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self._pending:
            if work is not None:  # this rank is in no group of the receiver
                work.wait()
        self._pending.clear()


def receive(into: torch.Tensor, source: int) -> None:
    """Fill ``into`` (contiguous, one dimension) with what a global rank gave to ``P2PSender.send``."""
    for message in _messages(into):
        dist.recv(message, src=source)


def _messages(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split(_MESSAGE_BYTES // flat.element_size())

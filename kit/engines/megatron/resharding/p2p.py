"""Sends that need not be received yet, so that a rank can go on to what it writes itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist

BLOCK_BYTES = 32 * 2**20
"""Largest message: what is neither contiguous here nor there is copied, so this bounds what is held beside a tensor."""


class Outbox:
    """Point-to-point sends in flight. At most ``BLOCK_BYTES`` of copies are held; views of live tensors cost nothing.

    Nothing waits in a circle as long as all ranks go through their tensors in the same order and a tensor's receiver
    takes all of it before it goes on: whoever waits for a send waits for a rank that is further behind.
    """

    def __init__(self) -> None:
        self._flying: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self._copied_bytes = 0

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor of at most two dimensions to a global rank; it must not change before ``wait``."""
        for block in row_blocks(tensor):
            message = block.contiguous()
            copied = 0 if message.data_ptr() == block.data_ptr() else message.numel() * message.element_size()
            while copied and self._copied_bytes and self._copied_bytes + copied > BLOCK_BYTES:
                self._wait_oldest()
            self._flying.append((dist.isend(message, dst=to), message, copied))
            self._copied_bytes += copied

    def wait(self) -> None:
        """Until everything has left."""
        while self._flying:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        work, _, copied = self._flying.popleft()
        work.wait()
        self._copied_bytes -= copied


def receive(into: torch.Tensor, source: int) -> None:
    """What the other side gave to ``Outbox.send``: a tensor of the same shape, contiguous or not."""
    for block in row_blocks(into):
        message = block if block.is_contiguous() else torch.empty_like(block, memory_format=torch.contiguous_format)
        dist.recv(message, src=source)
        if message is not block:
            block.copy_(message)


def row_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of some rows each, at most BLOCK_BYTES or one row; the same on both sides, whatever the strides."""
    row_bytes = tensor[0].numel() * tensor.element_size() if tensor.shape[0] else 1
    yield from tensor.split(max(1, BLOCK_BYTES // row_bytes))

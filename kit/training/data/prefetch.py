"""The next step's data, read while the GPU computes this one's, in page-locked memory.

What a step is made of depends on its position and size alone, so one that was read beforehand is the one that would
have been read: a step that turns out to be another (after a rewind) is read anew. Copies to the device are the
engines' own: from page-locked memory they run beside the host, and the tokens of a step are a few hundred KiB, for
which a stream of their own would be more work than they are.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kit.engines.base import MicroBatch
from kit.training.data.loader import DataLoader


def should_prefetch(device: str) -> bool:
    """A CPU process computes on the cores that would read: nothing is gained there."""
    return device == "cuda"


class Prefetcher:
    """A feed that is told what will be asked next. Without ``wanted`` it reads when it is asked."""

    def __init__(self, feed: DataLoader, *, wanted: bool, pinned: bool = False) -> None:
        self._feed, self._pinned = feed, pinned
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kit-data") if wanted else None
        self._expected: tuple[int, int] | None = None
        self._coming: Future[list[MicroBatch]] | None = None

    def step(self, position: int, batch_size: int) -> list[MicroBatch]:
        """Micro batches of a step, as ``DataLoader.step``. Raises DataError, also for an error met while reading
        ahead."""
        coming, expected = self._coming, self._expected
        self._coming = self._expected = None
        if coming is not None and expected == (position, batch_size):
            return coming.result()
        if coming is not None:
            coming.cancel()
        return self._read(position, batch_size)

    def expect(self, position: int, batch_size: int) -> None:
        """Begin to read what ``step`` will probably be asked for next."""
        if self._reader is not None:
            self._expected = position, batch_size
            self._coming = self._reader.submit(self._read, position, batch_size)

    def validation_batches(self) -> list[MicroBatch] | None:
        """Micro batches of the held-out data (``DataLoader``)."""
        return self._feed.validation_batches()

    def close(self) -> None:
        """Read no more; what is being read is waited for."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _read(self, position: int, batch_size: int) -> list[MicroBatch]:
        batches = self._feed.step(position, batch_size)
        return [pin(batch) for batch in batches] if self._pinned else batches


def pin(batch: MicroBatch) -> MicroBatch:
    """Copies a batch into page-locked memory, which torch keeps until copies from it are done (CachingHostAllocator).
    ``sequence_ids`` are read on the host alone."""
    fields = {
        field.name: getattr(batch, field.name).pin_memory()
        for field in dataclasses.fields(batch)
        if field.name != "sequence_ids" and isinstance(getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **fields)

"""Safetensors files that several processes write at once: each process writes its own blocks of the tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import xxhash

from kit.engines.io.sharded_safetensors import header
from kit.errors import CheckpointError

BLOCK_BYTES = 8 * 2**20
_FLUSH_BYTES = 64 * 2**20
_HASHED_WORDS = 2**18
_WORD = np.dtype(np.uint32)


class ParallelFile:
    """The layout of one file of fp32 tensors. ``starts``: name → offset of the tensor in bytes."""

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        """``shapes``: name → shape, in the order of the tensors in the file."""
        self.path, self.shapes = path, shapes
        self._head, self.starts = header({name: (torch.float32, shape) for name, shape in shapes.items()}, True)
        self.elements = sum(math.prod(shape) for shape in shapes.values())

    def create(self) -> int:
        """Create the file at full size and write its header. Returns the sum of the header's words. Raises OSError."""
        size = len(self._head) + 4 * self.elements
        with open(self.path, "wb") as file:
            file.write(self._head)
            file.truncate(size)
        return _words(np.frombuffer(self._head, _WORD))


class BlockWriter(AbstractContextManager["BlockWriter", None]):
    """Writes blocks into existing files, while entered. One file is open at a time; a thread flushes written data to
    the disk, where all of it is at the end. After a failure the caller removes the files."""

    def __init__(self) -> None:
        self._file: ParallelFile | None = None
        self._descriptor = -1
        self._unflushed = 0
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._flushing: list[Future[None]] = []
        self.written: dict[Path, tuple[int, int]] = {}
        """File → (elements that this process wrote to it, sum of their words modulo 2**32)."""

    def write(self, file: ParallelFile, name: str, row: int, column: int, values: torch.Tensor) -> None:
        """Write a block of tensor ``name``. ``values``: (rows, columns) of the tensor from (``row``, ``column``) on; a
        vector is one column. Raises OSError, and CheckpointError for a block that is not inside of the tensor."""
        if not values.numel():
            return
        self._switch(file)
        shape = file.shapes[name]
        width = math.prod(shape) // shape[0]
        if min(row, column) < 0 or row + values.shape[0] > shape[0] or column + values.shape[1] > width:
            raise CheckpointError(
                f"{file.path}: a block of {list(values.shape)} at ({row}, {column}) is outside of {name}, which has "
                f"{list(shape)}"
            )
        step = max(1, BLOCK_BYTES // (4 * values.shape[1]))
        for first, block in zip(range(0, values.shape[0], step), values.split(step), strict=True):
            start = file.starts[name] + 4 * ((row + first) * width + column)
            array = _rows(block)
            if values.shape[1] == width:
                self._put(array, start)
            else:
                self._put_lines(array, start, 4 * width)
            self._unflushed += array.nbytes
            if self._unflushed >= _FLUSH_BYTES and (not self._flushing or self._flushing[-1].done()):
                self._flushing.append(self._disk.submit(os.fdatasync, self._descriptor))
                self._unflushed = 0
            elements, words = self.written.get(file.path, (0, 0))
            self.written[file.path] = elements + array.size, (words + _words(array.view(_WORD))) % 2**32

    def __exit__(self, failure: object, *_: object) -> None:
        """Raises OSError."""
        self._switch(None)
        self._disk.shutdown()
        for each in self._flushing if failure is None else ():
            each.result()

    def _switch(self, file: ParallelFile | None) -> None:
        if file is self._file:
            return
        if self._file is not None:
            self._flushing.append(self._disk.submit(_close, self._descriptor))
        self._file, self._unflushed = None, 0
        if file is not None:  # ``_file`` is still None if this raises, so no file is closed twice
            self._descriptor = os.open(file.path, os.O_WRONLY)
            self._file = file

    def _put_lines(self, array: np.ndarray, start: int, stride: int) -> None:
        """Write the rows of ``array``, each ``stride`` bytes after the row before."""
        size = array.shape[1] * array.itemsize
        for number, line in enumerate(array):
            if os.pwrite(self._descriptor, line, start + number * stride) != size:
                self._put(line, start + number * stride)  # after a partial write: write the whole row

    def _put(self, array: np.ndarray, start: int) -> None:
        rest = array.data.cast("B")
        while rest:
            written = os.pwrite(self._descriptor, rest, start)
            rest, start = rest[written:], start + written


def size_hash_and_sum(path: Path) -> tuple[int, str, int]:
    """(bytes, XXH3 hash, sum of the words modulo 2**32) of a file. Raises OSError."""
    digest, total = xxhash.xxh3_128(), 0
    # Mapped, not read: most of the file is still in the page cache, and mapping avoids a copy.
    words = np.memmap(path, _WORD, mode="r")
    for block in np.split(words, range(_HASHED_WORDS, len(words), _HASHED_WORDS)):
        digest.update(block)
        total += _words(block)
    return words.nbytes, digest.hexdigest(), total % 2**32


def _rows(block: torch.Tensor) -> np.ndarray:
    """``block`` (rows, columns) as fp32 on the host, with contiguous rows."""
    block = block.float().cpu()
    array: np.ndarray = (block if block.stride(1) == 1 or block.shape[1] == 1 else block.contiguous()).numpy()
    return array if array.shape[1] > 1 else np.ascontiguousarray(array)


def _words(array: np.ndarray) -> int:
    return int(np.add.reduce(array, axis=None, dtype=_WORD))


def _close(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)

"""Named tensors in sharded safetensors files: a reader of parts of tensors, and writers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kit.engines.base import TensorSource
from kit.errors import CheckpointError
from kit.units import GIB

DEFAULT_SHARD_BYTES = GIB


class SafetensorsSource(TensorSource):
    """A ``TensorSource`` over safetensors files.

    ``files``: name of a tensor → file that holds it; ``renames``: name given → name inside the file, where they
    differ. Opening a file reads its header only; one file is kept open at a time. Raises CheckpointError for a
    file that is missing, truncated or not safetensors, and for a name that is not there.
    """

    def __init__(self, files: Mapping[str, Path], renames: Mapping[str, str] | None = None) -> None:
        self._files = dict(files)
        self._renames = dict(renames or {})
        self._open_path: Path | None = None
        self._open_file: Any = None

    def names(self) -> Sequence[str]:
        """Names that ``read`` takes."""
        return list(self._files)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the dtype on disk."""
        return self._get(name, lambda file, stored: file.get_tensor(stored))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor, from the header alone."""
        return self._get(name, lambda file, stored: tuple(file.get_slice(stored).get_shape()))

    def read_flat(self, name: str, start: int, length: int) -> torch.Tensor:
        """Elements ``start`` … of the flattened tensor, at most ``length`` of them; only their rows are read."""

        def read(file: Any, stored: str) -> torch.Tensor:
            part = file.get_slice(stored)
            rows, *rest = part.get_shape()
            row = math.prod(rest)
            first, last = start // row, min(rows, -(-(start + length) // row))
            if first >= last:
                return part[0:0].flatten()
            return part[first:last].flatten()[start - first * row :][:length]

        found: torch.Tensor = self._get(name, read)
        return found

    def read_block(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows or columns of a tensor: a view of the mapped file, without memory of its own until it is copied."""
        index = (slice(None),) * dim + (slice(start, start + length),)
        found: torch.Tensor = self._get(name, lambda file, stored: file.get_slice(stored)[index])
        return found

    def _get(self, name: str, what: Any) -> Any:
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is not in the checkpoint; it has {len(self._files)} other tensors")
        path = self._files[name]
        try:
            if path != self._open_path:
                self._open_file = safe_open(path, framework="pt")
                self._open_path = path
            return what(self._open_file, self._renames.get(name, name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}); the file is missing, truncated or foreign: "
                f"copy it again from where it was complete"
            ) from error


def file_names(path: Path) -> list[str]:
    """Names of the tensors in one safetensors file. Raises CheckpointError as ``SafetensorsSource`` does."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}); the file is missing, truncated or foreign: "
            f"copy it again from where it was complete"
        ) from error


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int]]:
    """What a file with these tensors begins with, a multiple of 8 bytes, and where in the file each tensor starts.

    The format (github.com/huggingface/safetensors, README, "Format"): the length of the header as 8 bytes little
    endian, the header as JSON, the bytes of the tensors in the order of their offsets.
    """
    contents: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        contents[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        starts[name] = start
    text = json.dumps(contents, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return text, {name: len(text) + start for name, start in starts.items()}


class SafetensorsWriter:
    """One safetensors file, written as its tensors come: nothing is held, and the hash is there at the end."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        """``tensors``: dtype and shape of each, in the order in which ``write`` will get them. Raises OSError."""
        text, _ = header(tensors)
        self._expected = list(tensors.items())[::-1]
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by finish
        self._flusher = _Flusher(self._file.fileno())
        self._put(memoryview(text))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, on the CPU; nothing of it is kept. Raises OSError."""
        expected, (dtype, shape) = self._expected.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, dtype, tuple(shape)), (name, expected)
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK_BYTES):
            self._put(data[start : start + _CHUNK_BYTES])

    def finish(self) -> tuple[int, str]:
        """Make it durable; returns its size and XXH3 hash. Raises OSError."""
        assert not self._expected
        self._file.flush()
        self._flusher.stop()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._bytes, self._hash.hexdigest()

    def abandon(self) -> None:
        """Close what a failure left; the caller removes the file."""
        self._flusher.stop()
        with contextlib.suppress(OSError):
            self._file.close()

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._bytes += len(data)
        self._flusher.wrote(len(data))
        self._hash.update(data)


_CHUNK_BYTES = 8 * 2**20
_FLUSH_BYTES = 64 * 2**20
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class _Flusher:
    """Has the disk work while the next bytes are copied and hashed; the kernel would wait for the fsync at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unflushed = 0
        self._thread: threading.Thread | None = None

    def wrote(self, count: int) -> None:
        self._unflushed += count
        if self._unflushed >= _FLUSH_BYTES and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._flush, daemon=True)
            self._thread.start()
            self._unflushed = 0

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # the fsync of finish() meets the same error, and reports it
            os.fdatasync(self._descriptor)


def plan_files(
    names: Iterable[str], shapes: Mapping[str, Sequence[int]], itemsize: int, shard_bytes: int
) -> list[list[str]]:
    """Names → the names of each file, in order: at most ``shard_bytes`` a file, or one tensor if that is larger."""
    files: list[list[str]] = []
    held = 0
    for name in names:
        num_bytes = math.prod(shapes[name]) * itemsize
        if not files or held + num_bytes > shard_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += num_bytes
    return files


class ShardWriter:
    """Collects tensors and writes ``<stem>-00001.safetensors``, … whenever a shard is full.

    Holds at most ``shard_bytes`` of tensors, or one tensor if that is larger. Files are fsynced. Errors of the
    file system (a full disk) surface as OSError or SafetensorError: the caller knows what is half-written.
    """

    def __init__(self, directory: Path, stem: str, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._directory, self._stem, self._shard_bytes = directory, stem, shard_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self.weight_map: dict[str, str] = {}
        """Name of each tensor written → name of its file."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor (CPU); it must not be modified before ``finish``."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._tensors and self._held_bytes + num_bytes > self._shard_bytes:
            self._flush()
        self._tensors[name] = tensor.contiguous()
        self._held_bytes += num_bytes

    def finish(self) -> dict[str, str]:
        """Write what is left; returns ``weight_map``."""
        if self._tensors:
            self._flush()
        return self.weight_map

    def _flush(self) -> None:
        number = len(set(self.weight_map.values())) + 1
        file_name = f"{self._stem}-{number:05d}.safetensors"
        path = self._directory / file_name
        save_file(self._tensors, path, metadata={"format": "pt"})
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        self.weight_map |= dict.fromkeys(self._tensors, file_name)
        self._tensors, self._held_bytes = {}, 0


def read_weight_map(index: Path) -> dict[str, str]:
    """The ``weight_map`` of a Hugging Face ``*.safetensors.index.json``. Raises CheckpointError."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a safetensors index ({error!r}); copy it again from the model"
        ) from error

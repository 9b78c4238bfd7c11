"""The files of a ``.bin``/``.idx`` pair, on a disk or at an address such as ``s3://bucket/sets/a``.

On a disk both are mapped into memory. At an address the index is copied to a cache of this host, and tokens are read by
ranges of bytes. Megatron-core's reader keeps one block of 256 MiB (megatron/core/datasets/indexed_dataset.py,
``_S3BinReader``), which suits a stream in file order. In shuffled order each sample of 4,096 tokens would cost a block;
here it costs a request of 8 or 16 kB, and all requests of a step run at the same time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kit.errors import DataError
from kit.files import locked, publish
from kit.object_storage import UNKNOWN_VERSION, RemoteFile, files_beside, is_address
from kit.specs.local import user_cache

Ranges = Sequence[tuple[int, int]]
"""(start, count) in tokens."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses before further tries: a run outlives a minute without storage."""


def open_pair(prefix: str) -> DiskPair | RemotePair:
    """The files of a pair. Raises DataError if one is missing."""
    return RemotePair(prefix) if is_address(prefix) else DiskPair(prefix)


class DiskPair:
    """Maps the ``.bin`` into memory."""

    def __init__(self, prefix: str) -> None:
        for suffix in (".bin", ".idx"):
            if not os.path.isfile(prefix + suffix):
                raise _missing(prefix, suffix)
        self._bin, self.index, self._sidecar = (Path(prefix + suffix) for suffix in (".bin", ".idx", ".json"))
        self.bin_bytes = self._bin.stat().st_size

    def sidecar(self) -> bytes | None:
        """Content of the sidecar; None without one."""
        return self._sidecar.read_bytes() if self._sidecar.is_file() else None

    def reader(self, dtype: np.dtype) -> Callable[[Ranges], list[np.ndarray]]:
        """A function that reads ranges of tokens."""
        # A plain array, because slices of a memmap are memmaps, and each costs as much as reading thousands of tokens.
        tokens = np.memmap(self._bin, mode="r", dtype=dtype).view(np.ndarray)
        return lambda ranges: [tokens[start : start + count] for start, count in ranges]


class RemotePair:
    """Reads the ``.bin`` by ranges, and writes nothing of it to a disk. Raises DataError if the storage fails for
    longer than ``PAUSES_S``, and if a file is replaced."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._files, self._name = files_beside("the data", prefix, DataError, PAUSES_S)
        self._bin = self._find(".bin")
        self.bin_bytes = self._bin.num_bytes
        self.index = self._cached_index()

    def sidecar(self) -> bytes | None:
        """Content of the sidecar; None without one."""
        return self._files.read(f"{self._name}.json")

    def reader(self, dtype: np.dtype) -> Callable[[Ranges], list[np.ndarray]]:
        """A function that reads ranges of tokens."""
        size = dtype.itemsize

        def read(ranges: Ranges) -> list[np.ndarray]:
            bounds = [(start * size, (start + count) * size) for start, count in ranges]
            parts = self._files.read_ranges(f"{self._name}.bin", bounds)
            self._require_same(".bin", self._bin)  # after the reads: so all of them were of this version
            return [np.frombuffer(part, dtype) for part in parts]

        return read

    def _find(self, suffix: str) -> RemoteFile:
        found = self._files.find(self._name + suffix)
        if found is None:
            raise _missing(self._prefix, suffix)
        return found

    def _require_same(self, suffix: str, before: RemoteFile) -> None:
        if (now := self._find(suffix)) != before:
            raise DataError(
                f"{self._prefix}{suffix} was replaced while the run reads it ({before.version}, now {now.version}); "
                "restore it, or start a run with the new set"
            )

    def _cached_index(self) -> Path:
        """One process of a host fetches the index, the others wait. A new version has a new name."""
        there, suffix = self._find(".idx"), ".idx"
        version = f"{self._prefix}{suffix} {there.version} {there.num_bytes}"
        path = user_cache("indexes") / (hashlib.sha256(version.encode()).hexdigest()[:32] + suffix)
        partial = path.with_suffix(f".partial-{os.uname().nodename}-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):  # where a file system has no locks, several fetch it
                whole = path.is_file() and path.stat().st_size == there.num_bytes
                if not whole or there.version == UNKNOWN_VERSION:
                    self._files.get(self._name + suffix, partial)
                    self._require_same(suffix, there)
                    publish(partial, path)
        except OSError as error:
            raise DataError(
                f"{self._prefix}{suffix} cannot be copied to {path.parent} ({error}); make room there, or set "
                "XDG_CACHE_HOME"
            ) from error
        finally:
            with suppress(OSError):
                partial.unlink()
        return path


def _missing(prefix: str, suffix: str) -> DataError:
    return DataError(f"{prefix}{suffix} is missing; make it with: kit convert data TEXT --tokenizer DIR --out {prefix}")

"""Named tensors in sharded safetensors files: a reader that holds one tensor, a writer that holds one shard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kit.errors import CheckpointError
from kit.units import GIB

DEFAULT_SHARD_BYTES = GIB


class SafetensorsSource:
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
        """Its shape, from the header alone."""
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

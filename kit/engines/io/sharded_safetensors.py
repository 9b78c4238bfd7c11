"""Reads parts of tensors from sharded files, safetensors or transformers' older ``.bin``, and writes safetensors."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from kit.engines.protocol import TensorSource
from kit.engines.safe_unpickle import load_safely
from kit.errors import CheckpointError
from kit.specs.text import shown
from kit.units import GIB

DEFAULT_SHARD_BYTES = GIB


class SafetensorsSource(TensorSource):
    """A ``TensorSource`` over safetensors files, or ``.bin`` files of transformers.

    ``files``: name of a tensor → its file; a ``.bin`` is read by the closed list (kit.engines.safe_unpickle).
    ``renames``: name of a tensor → its name inside the file, if they differ.
    Opening a file reads its header only; one file is open at a time. A tensor is a view of the mapped file: of a part
    of it no other bytes are read. Raises CheckpointError if a file is missing, truncated or not safetensors, and if a
    name is not in the file.
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
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is not in the checkpoint; it has {len(self._files)} other tensors")
        path = self._files[name]
        with _reader_errors(path):
            if path != self._open_path:
                self._open_file = _open(path)
                self._open_path = path
            tensor: torch.Tensor = self._open_file.get_tensor(self._renames.get(name, name))
            return tensor


def _open(path: Path) -> Any:
    return _Pickled(path) if path.suffix == ".bin" else safe_open(path, framework="pt")


@contextmanager
def _reader_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}); the file is missing, truncated or foreign: "
            f"copy it again from where it was complete"
        ) from error


class _Pickled(dict[str, torch.Tensor]):
    """A file of ``torch.save`` with the methods of ``safe_open``. Its tensors are mapped into memory."""

    def __init__(self, path: Path) -> None:
        loaded = load_safely(path, mapped=True)
        if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
            raise CheckpointError(f"{path} is not a dictionary of tensors; give the file that save_pretrained wrote")
        super().__init__({str(name): tensor.detach() for name, tensor in loaded.items()})

    def get_tensor(self, name: str) -> torch.Tensor:
        if name not in self:
            raise OSError(f"it has no tensor {name}")
        return self[name]


def file_names(path: Path) -> list[str]:
    """Names of the tensors in one file. Raises CheckpointError as ``SafetensorsSource`` does."""
    with _reader_errors(path):
        return list(_open(path).keys())


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], consolidates: bool = False
) -> tuple[bytes, dict[str, int]]:
    """(header of a file with these tensors, name → offset of the tensor in the file). The header's length is a multiple
    of 8 bytes.

    The format (github.com/huggingface/safetensors, README, "Format"): the length of the header as 8 bytes little
    endian, the header as JSON, the bytes of the tensors in the order of their offsets. ``consolidates``: with what
    torch's consolidate_safetensors_files needs to know: that the tensors are whole.
    """
    contents: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if consolidates:
        whole = {name: {"saved_offsets": [0] * len(shape)} for name, (_, shape) in tensors.items()}
        contents["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(whole)
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


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_tensors(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], source: TensorSource
) -> tuple[int, str]:
    """Write one file from ``source`` and flush it to the disk; returns its size in bytes and its XXH3 hash.

    Reads one tensor at a time. ``tensors``: name → (dtype, shape), in the order of the file. Raises OSError; the caller
    removes the partial file.
    """
    head, _ = header(tensors)
    digest = xxhash.xxh3_128(head)
    with open(path, "wb") as file:
        file.write(head)
        for name, (dtype, shape) in tensors.items():
            tensor = source.read(name).to(dtype)
            assert tuple(tensor.shape) == tuple(shape), name
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            file.write(data)
            if sys.platform == "linux":
                # The kernel starts to write dirty pages (mm/fadvise.c), so the disk works while the next tensor is read
                # and hashed. Otherwise fsync would wait for all pages at the end.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def split_into_files(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], shard_bytes: int) -> StateDictSplit:
    """Which tensors are in which file, as ``save_pretrained`` splits them. A file has at most ``shard_bytes`` bytes, or
    one larger tensor. ``tensors``: name → (dtype, shape)."""
    return split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: math.prod(tensor[1]) * tensor[0].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """The ``weight_map`` of a Hugging Face ``*.safetensors.index.json``. Raises CheckpointError."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a safetensors index ({shown(error)}); copy it again from the model"
        ) from error

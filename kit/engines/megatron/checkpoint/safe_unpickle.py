"""What of a checkpoint is pickled, read without running a word of it.

The table of contents has few classes, which are known. ``common.pt`` holds whatever a program had at hand (Megatron-LM
its arguments and enumerations of its own): of it plain values are read, and everything else is nothing.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from kit.engines import closed_list

_METADATA = "torch.distributed.checkpoint.metadata"
_CONTENTS = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "getattr"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata`` and nothing else: its classes hold sizes, dtypes, file names and places in files."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if is_dtype or (module, name) in _CONTENTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents has")


def _enum_member(owner: Any, name: str) -> Any:
    """Python 3.11 pickles a member of an enumeration as ``getattr(class, name)``; nothing else is looked up."""
    if not (isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it looks up {name} of {owner!r}, which no table of contents does")
    return owner.__members__[name]


def plain_values(path: Path) -> Any:
    """What ``torch.save`` wrote, a placeholder for every object of a program's own. Raises CheckpointError for a
    damaged file."""
    return closed_list.load_restricted(path, [(_Placeholder, name) for name in closed_list.unknown_names(path)])


class _Placeholder:
    """Stands for an object of an unknown class: accepts all state and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> _Placeholder:
        return object.__new__(cls)

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def _take(self, _: Any) -> None:
        return None

    __setstate__ = append = extend = add = _take

"""Reads the table of contents of torch's distributed checkpoints (``.metadata``) without running its code: it has a few
known classes only."""

from __future__ import annotations

import pickle
from enum import Enum
from typing import Any

import torch

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
    """Reads ``.metadata``: allows only its classes, which have sizes, dtypes, file names and offsets in files."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if is_dtype or (module, name) in _CONTENTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents has")


def _enum_member(owner: Any, name: str) -> Any:
    """Stands for ``getattr(class, name)``, as Python 3.11 pickles a member of an enumeration. Refuses all others."""
    if not (isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it looks up {name} of {owner!r}, which no table of contents does")
    return owner.__members__[name]

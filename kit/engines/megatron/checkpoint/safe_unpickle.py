"""What of a checkpoint is pickled, read without running a word of it.

The table of contents has few classes, which are known. ``common.pt`` holds whatever a program had at hand (Megatron-LM
its arguments and enumerations of its own): of it plain values are read, and everything else is nothing.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

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
}
_CONTENT_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class Contents(pickle.Unpickler):
    """Reads ``.metadata`` and nothing else: its classes hold sizes, dtypes, file names and places in files."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module in _CONTENT_MODULES and "." not in name) or is_dtype or (module, name) in _CONTENTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents has")


def _enum_member(owner: Any, name: str) -> Any:
    """Python 3.11 pickles a member of an enumeration as ``getattr(class, name)``; nothing else is looked up."""
    if not (isinstance(owner, type) and owner.__module__ in _CONTENT_MODULES) or name.startswith("_"):
        raise pickle.UnpicklingError(f"it looks up {name} of {owner!r}, which no table of contents does")
    return getattr(owner, name)


_PLAIN = {("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size"), ("collections", "OrderedDict")}


def plain_values(path: Path) -> Any:
    """What ``torch.save`` wrote, a ``StandIn`` in place of every object of a program's own. Raises OSError, and
    UnpicklingError, RuntimeError or EOFError for a damaged file."""
    # torch's older format is read by ``load``.
    reader = SimpleNamespace(Unpickler=_Plain, load=lambda file, **_: _Plain(file).load(), __name__=__name__)
    # Storages stay where they were read to: host memory, whatever device they were saved from.
    return torch.load(path, map_location=lambda storage, _: storage, weights_only=False, pickle_module=reader)


class StandIn:
    """Of an object that is not made: takes whatever it is given, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return object.__new__(cls)

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def _take(self, _: Any) -> None:
        return None

    __setstate__ = append = extend = add = _take


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return super().find_class(module, name) if is_dtype or (module, name) in _PLAIN else StandIn

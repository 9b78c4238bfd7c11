"""Files of ``torch.save`` with objects of another program's classes, which stay closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch.serialization import get_unsafe_globals_in_checkpoint

from kit.engines.safe_unpickle import load_safely, only, refusal
from kit.errors import CheckpointError


class Opaque:
    """Stands for an object of another program's class. Accepts any state and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return object.__new__(cls)

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def _take(self, _: Any) -> None:
        return None

    __setstate__ = append = extend = add = _take


def unknown_names(path: Path) -> list[str]:
    """Names of all classes and functions in a file, except those of tensors and plain values. Runs no code of the
    file.

    Raises CheckpointError if ``torch.save`` did not write the file, or wrote it in torch's older format.
    """
    try:
        with only(()):
            return get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise CheckpointError(refusal(path, error)) from error


def plain_values(path: Path) -> Any:
    """Load a file of ``torch.save`` that may contain any object of the program that wrote it, such as Megatron-LM's
    arguments: only plain values and tensors are loaded, any other object is ``Opaque``. Raises CheckpointError if the
    file is damaged."""
    return load_safely(path, [(Opaque, name) for name in unknown_names(path)])

"""Reads files of ``torch.save`` safely: builds tensors, plain values and a closed list of classes, and nothing else.

A pickle is a program: it can call every class or function that its reader lets it name. torch's restricted reader
(torch/_weights_only_unpickler.py) allows tensors, plain values and the classes that this module passes to it. It
refuses any other name, even if a manifest vouches for the file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from kit.errors import CheckpointError

Allowed = Sequence[type | tuple[Callable[..., Any], str]]
"""The classes that a file may name beside tensors and plain values. A pair is (substitute, name in the file)."""


def load_restricted(path: Path, allowed: Allowed = (), map_location: Any = "cpu", mapped: bool = False) -> Any:
    """Load a file of ``torch.save``. ``mapped``: map the file into memory, so that tensors are read on first access.

    Raises CheckpointError if the file is missing or damaged, or names a class that is not allowed. No code of the file
    runs.
    """
    try:
        with safe_globals(list(allowed)):
            mapped = mapped and zipfile.is_zipfile(path)  # torch cannot map its older format
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(_refusal(path, error)) from error


def unknown_names(path: Path) -> list[str]:
    """Names of all classes and functions in a file, except those of tensors and plain values. Runs no code of the
    file.

    Raises CheckpointError if ``torch.save`` did not write the file, or wrote it in torch's older format.
    """
    try:
        return get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise CheckpointError(_refusal(path, error)) from error


def _refusal(path: Path, error: Exception) -> str:
    """Replaces torch's message, which advises loading the file without restrictions."""
    words = " ".join(str(error).split()) or type(error).__name__
    name = words.partition("GLOBAL ")[2].partition(" ")[0]
    if name:
        return (
            f"{path} names {name}, which is not in the closed list of classes that kit reads; nothing of it was run: "
            f"use a checkpoint from a source you trust"
        )
    return f"{path} cannot be read ({words[:200]}); copy the checkpoint again, complete"

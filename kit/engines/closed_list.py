"""Pickled files, read by a reader that builds tensors and a closed list of classes and calls nothing else.

A pickle is a program: what its reader lets it name, it can call. torch's own restricted reader
(torch/_weights_only_unpickler.py) knows tensors, plain values and what it is told of here, and refuses anything else,
whatever a manifest says of the file. Nowhere else does kit read what ``torch.save`` wrote.
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
"""Classes beside tensors and plain values; or what stands in for a name, and the name."""


def load_restricted(path: Path, allowed: Allowed = (), map_location: Any = "cpu", mapped: bool = False) -> Any:
    """What ``torch.save`` wrote. ``mapped``: leave the tensors' values on disk until they are looked at.

    Raises CheckpointError where the file is missing or damaged, or names anything that is not allowed: nothing of it
    has run then.
    """
    try:
        with safe_globals(list(allowed)):
            mapped = mapped and zipfile.is_zipfile(path)  # torch's older format cannot be
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(_refusal(path, error)) from error


def unknown_names(path: Path) -> list[str]:
    """Every class and function that a file names beside those of tensors and plain values; nothing of it is run.

    Raises CheckpointError for a file that ``torch.save`` did not write, or wrote in its older format.
    """
    try:
        return get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise CheckpointError(_refusal(path, error)) from error


def _refusal(path: Path, error: Exception) -> str:
    """torch's own words advise to load the file all the same."""
    words = " ".join(str(error).split()) or type(error).__name__
    name = words.partition("GLOBAL ")[2].partition(" ")[0]
    if name:
        return (
            f"{path} names {name}, which is not in the closed list of classes that kit reads; nothing of it was run: "
            f"use a checkpoint from a source you trust"
        )
    return f"{path} cannot be read ({words[:200]}); copy the checkpoint again, complete"

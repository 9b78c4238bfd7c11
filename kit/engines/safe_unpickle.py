"""Reads files of ``torch.save`` safely: builds tensors, plain values and a closed list of classes, and nothing else.

A pickle is a program: it can call every class or function that its reader lets it name. torch's restricted reader
(torch/_weights_only_unpickler.py) allows tensors, plain values and the classes that this module passes to it. It
refuses any other name, even if a manifest vouches for the file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
)

from kit.errors import CheckpointError

Allowed = Sequence[type | tuple[Callable[..., Any], str]]
"""The classes that a file may name beside tensors and plain values. A pair is (substitute, name in the file)."""


def load_safely(path: Path, allowed: Allowed = (), mapped: bool = False) -> Any:
    """Load a file of ``torch.save``. ``mapped``: map the file into memory, so that tensors are read on first access.

    Raises CheckpointError if the file is missing or damaged, or names a class that is not allowed. No code of the file
    runs.
    """
    try:
        with only(allowed):
            mapped = mapped and zipfile.is_zipfile(path)  # torch cannot map its older format
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(refusal(path, error)) from error


@contextmanager
def only(allowed: Allowed) -> Iterator[None]:
    """While entered, torch's reader allows these classes alone. Other libraries add theirs to its list for the whole
    process when they are imported: megatron-core has a dozen (core/safe_globals.py), torchao fifty."""
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(list(allowed))
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def refusal(path: Path, error: Exception) -> str:
    """Replaces torch's message, which advises loading the file without restrictions."""
    words = " ".join(str(error).split()) or type(error).__name__
    name = words.partition("GLOBAL ")[2].partition(" ")[0]
    if name:
        return (
            f"{path} names {name}, which is not in the closed list of classes that kit reads; nothing of it was run: "
            f"use a checkpoint from a source you trust"
        )
    return f"{path} cannot be read ({words[:200]}); copy the checkpoint again, complete"

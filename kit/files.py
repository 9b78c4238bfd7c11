"""A file that is complete or absent, and one lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a directory's entries, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """While entered, the caller writes to ``.NAME.partial`` beside ``path``. At the end it is flushed to the disk and
    renamed, and so is the directory's entry.

    After an error, a kill or a power cut at any moment ``path`` has its old content or the new one, whole; an error
    also leaves no partial file. Two processes that write one path at once need ``locked``. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """While entered, no other process is in here with the same ``path``, which is made if it is missing and keeps its
    content. The lock ends with the process, however it ends, and follows a rename. Who is in here may remove or rename
    the file: a process that has opened it before that takes a new one.

    ``wait``: until it is free; otherwise raises BlockingIOError. Some shared file systems have no locks: there nothing
    is locked. Raises OSError.
    """
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError:
                pass
            if _is_named(path, file):
                yield
                return


def _is_named(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False

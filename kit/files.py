"""Files and directories that are complete or absent, and one lock.

What is written here gets its name last, when all its bytes are on the disk (write, fsync, rename, fsync of the parent):
after an error, a kill or a power cut at any moment the name has its old content or the new one, whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
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


def partial_name(path: Path) -> Path:
    """Name under which a file or a directory is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """While entered, the caller writes to ``.NAME.partial`` beside ``path``; at the end it gets its name.

    An error leaves no other file; what a kill leaves the next writer replaces. Two processes that write one path at
    once need ``locked``. Raises OSError.
    """
    partial = partial_name(path)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


def write_text(path: Path, text: str, *, overwrite: bool = True) -> None:
    """Write a small file in UTF-8, whole or not at all. Raises OSError; FileExistsError if it is there and may not be
    overwritten."""
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with complete_file(path) as file:
        file.write(text.encode())


def publish(partial: Path, directory: Path) -> None:
    """Give a directory its name, with everything in it on the disk, or a file. Raises OSError, also if ``directory`` is
    one that is there and not empty."""
    for path in [*partial.rglob("*"), partial]:
        fsync(path)
    if directory.is_dir():
        directory.rmdir()  # empty, or rmdir raises; rename onto a directory is not portable
    partial.rename(directory)
    fsync(directory.parent)


@contextmanager
def complete_directory(directory: Path) -> Iterator[Path]:
    """While entered, the caller writes into ``partial_name(directory)``, which is new; at the end it gets its name.

    An error leaves no files. Raises OSError; BlockingIOError if another process writes it now.
    """
    partial = partial_name(directory)
    lock = partial.with_name(f"{partial.name}.lock")
    if not directory.parent.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, wait=False):
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a kill
            partial.mkdir()
            yield partial
            publish(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink()


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

"""Directories that are complete or absent, and the hashes that prove it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kit.errors import CheckpointError


@dataclass(frozen=True)
class FileRecord:
    """What a manifest knows of a file."""

    bytes: int
    xxh3_128: str
    """XXH3, 128 bits: a tenth of the time of SHA-256 for the same accidents (cut, overwritten, mixed up). Neither keeps
    out who can write the directory, for the manifest is in it."""


def record_of(path: Path) -> FileRecord:
    """Size and hash of a file as it is on disk. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileRecord(bytes=os.fstat(file.fileno()).st_size, xxh3_128=digest.hexdigest())


def verify(directory: Path, records: Mapping[str, FileRecord], hashes: bool = True) -> None:
    """Raises CheckpointError that names the first file which is missing or differs from its record.

    ``hashes=False`` compares sizes only: enough for the ranks that do not read every byte.
    """
    for name, record in records.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the checkpoint again, complete")
        if (size := path.stat().st_size) != record.bytes:
            raise CheckpointError(
                f"{path} has {size} bytes where {record.bytes} were written: it is truncated or not this checkpoint's; "
                f"copy it again"
            )
        if hashes and record_of(path).xxh3_128 != record.xxh3_128:
            raise CheckpointError(f"{path} is corrupted (its hash differs from the manifest's); copy it again")


def refuse_unlisted(directory: Path, listed: Collection[str]) -> None:
    """Raises CheckpointError that names the first thing below that is no directory and not listed."""
    for path in sorted(directory.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and str(path.relative_to(directory)) not in listed:
            raise CheckpointError(
                f"{path} is not in the checkpoint's manifest: only files that the manifest lists may be beside them; "
                f"remove it, or copy the checkpoint again"
            )


def records_from_json(data: Any) -> dict[str, FileRecord]:
    """Raises ValueError for anything but name → {bytes, xxh3_128}, at least one."""
    if not isinstance(data, dict) or not data:
        raise ValueError("files must list at least one file")
    for name, record in data.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name} lies outside the checkpoint")
        if not isinstance(record, dict) or sorted(record) != ["bytes", "xxh3_128"]:
            raise ValueError(f"files.{name} must have exactly bytes and xxh3_128")
        if type(record["bytes"]) is not int or record["bytes"] < 0:
            raise ValueError(f"files.{name}.bytes must be a whole number, 0 or more")
        if not isinstance(record["xxh3_128"], str) or not re.fullmatch("[0-9a-f]{32}", record["xxh3_128"]):
            raise ValueError(f"files.{name}.xxh3_128 must be 32 hexadecimal digits")
    return {name: FileRecord(**record) for name, record in data.items()}


def fsync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: Any) -> None:
    """Write, fsync, and only then give the file its name. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    fsync(path.parent)


def files_below(directory: Path) -> list[Path]:
    """Regular files at any depth, sorted."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def is_free(path: Path) -> bool:
    """Whether ``path`` does not exist or is an empty directory."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def partial_name(directory: Path) -> Path:
    """Name under which ``directory`` is written before it is complete. Nothing under this name is a checkpoint."""
    return directory.with_name(f".{directory.name}.partial")


def publish(partial: Path, directory: Path) -> None:
    """Fsync everything, then rename: after a crash ``directory`` is complete or absent. Raises OSError."""
    for path in [*partial.rglob("*"), partial]:
        fsync(path)
    if directory.is_dir():
        directory.rmdir()  # only ever an empty one: rename onto it is not portable
    partial.rename(directory)
    fsync(directory.parent)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Build a directory under another name and publish it at the end; nothing is left of a failed attempt.

    Raises CheckpointError where ``directory`` exists already and is not empty.
    """
    if not is_free(directory):
        raise CheckpointError(f"{directory} exists and is not empty; choose another directory or remove it yourself")
    partial = partial_name(directory)
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        publish(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise

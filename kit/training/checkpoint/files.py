"""Directories that are complete or absent, and manifests with sizes and hashes of their files.

A manifest also has a hash of itself, over its canonical JSON without that hash. Hashes detect accidents only: an
attacker who can write the directory can also write a new manifest. So kit does not run code from a file that a manifest
lists (``kit.engines.safe_unpickle``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import Field
from safetensors import SafetensorError

from kit.errors import CheckpointError, SpecError
from kit.files import complete_directory, write_text
from kit.specs.strict_yaml import Document, parse
from kit.specs.text import shown
from kit.specs.text_files import parse_json, read_text
from kit.specs.validation import SPEC, Checked, Within, stored


@dataclass(frozen=True)
class FileRecord:
    """A manifest's record of one file."""

    __pydantic_config__ = SPEC
    bytes: Annotated[int, Within(ge=0)]
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    """XXH3, 128 bits. It detects the same accidents as SHA-256 (truncated, overwritten or swapped files) in a tenth of
    the time. Neither stops an attacker, who can also write the manifest."""


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name} is outside the checkpoint")
    return name


Files = Annotated[dict[Annotated[str, Checked(_inside)], FileRecord], Field(min_length=1)]
"""File path relative to the manifest's directory → record."""


def record_of(path: Path) -> FileRecord:
    """Size and hash of a file on disk. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileRecord(bytes=os.fstat(file.fileno()).st_size, xxh3_128=digest.hexdigest())


def verify(directory: Path, records: Mapping[str, FileRecord]) -> None:
    """Raises CheckpointError, which names the first file that is missing or differs from its record."""
    for name, record in records.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the checkpoint again, complete")
        if (size := path.stat().st_size) != record.bytes:
            raise CheckpointError(
                f"{path} has {size} bytes where {record.bytes} were written: it is truncated or not this checkpoint's; "
                f"copy it again"
            )
        if record_of(path).xxh3_128 != record.xxh3_128:
            raise CheckpointError(f"{path} is corrupted (its hash differs from the manifest's); copy it again")


def refuse_unlisted(directory: Path, listed: Collection[str]) -> None:
    """Raises CheckpointError, which names the first file or link in ``directory`` that is not in ``listed``."""
    for path in sorted(directory.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and str(path.relative_to(directory)) not in listed:
            raise CheckpointError(
                f"{path} is not in the checkpoint's manifest: only files that the manifest lists may be beside them; "
                f"remove it, or copy the checkpoint again"
            )


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file that is complete or absent. Raises OSError."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def refuse_existing(directory: Path) -> None:
    """Raises CheckpointError if ``directory`` exists and is not empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not empty; choose another directory or remove it yourself")


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """While entered, the caller writes into a temporary directory, which gets its name at the end. A failure leaves no
    files.

    Raises CheckpointError if ``directory`` exists and is not empty, or if it cannot be written.
    """
    try:
        refuse_existing(directory)
        with complete_directory(directory) as partial:
            refuse_existing(directory)  # another process may have been at its end
            yield partial
    except BlockingIOError:
        raise CheckpointError(
            f"another process writes {directory} now; wait for it, or choose another directory"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"writing {directory} failed: {error}; check the free space and the permissions there"
        ) from error


_Contents = TypeVar("_Contents")
_HASH = "sha256"
MOST_BYTES = 1 << 24
"""Largest size of a manifest that kit reads. A manifest of a hundred thousand files is smaller."""


def with_checksum(contents: Mapping[str, Any]) -> dict[str, Any]:
    """``contents`` with their hash, which replaces an older hash."""
    bare = {key: value for key, value in contents.items() if key != _HASH}
    canonical = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return {**bare, _HASH: hashlib.sha256(canonical.encode()).hexdigest()}


def read_checked(path: Path, into: type[_Contents], kind: str, version: int) -> _Contents:
    """The contents of a manifest of format ``kind``.

    Raises OSError; ValueError if the manifest is damaged or differs from its hash; OtherVersionError.
    """
    data = parse_json(read_text(path, MOST_BYTES))
    if not isinstance(data, dict) or not str(data.get("format")).startswith("kit-"):
        raise ValueError(f"format is not {kind!r}")
    found = (data["format"], data.get("version"))
    if found != (kind, version):
        wrote, reads = (f"{shown(name)} version {shown(number)}" for name, number in (found, (kind, version)))
        raise OtherVersionError(f"{path} has format {wrote}, this kit reads {reads}")
    return _opened(path, data, into, [key for key in data if key not in ("format", "version", _HASH)])


@stored
class _Listed:
    files: Files


def checked_files(path: Path, place: object) -> Files:
    """The files of a manifest of any format and version. Raises CheckpointError, which names its directory as
    ``place``, if it cannot be read, is damaged, or differs from its hash."""
    try:
        data = parse_json(read_text(path, MOST_BYTES))
        return _opened(path, data if isinstance(data, dict) else {}, _Listed, ["files"]).files
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place}/{path.name} is damaged or cannot be read ({error})") from error


def _opened(path: Path, data: Mapping[str, Any], into: type[_Contents], keys: Collection[str]) -> _Contents:
    """The values of ``keys``. Raises ValueError if the manifest differs from its hash, or the values do not fit."""
    if data.get(_HASH) != with_checksum(data)[_HASH]:
        raise ValueError("its own hash (sha256) differs or is missing: it was changed after it was written")
    said = {key: data.get(key) for key in keys}
    try:
        return parse(into, said, Document(path.name, said, {}))
    except SpecError as error:
        raise ValueError(" ".join(str(error).split())) from None


class OtherVersionError(CheckpointError):
    """The manifest has a version that this version of kit does not read."""

"""Files that a test writes or changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def file_with(path: Path, content: str | bytes) -> Path:
    """A file with this in it; its directory is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def files_in(directory: Path, files: Mapping[str, str | bytes]) -> Path:
    """A directory with these."""
    for name, content in files.items():
        file_with(directory / name, content)
    return directory


def files_below(directory: Path) -> dict[str, bytes]:
    """Name of each file below a directory, from there, and its content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def replace_in(path: Path, old: str, new: str) -> None:
    """A text of a file with another in its place."""
    path.write_text(path.read_text().replace(old, new))

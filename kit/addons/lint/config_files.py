"""Files that lint reads: found where another one names them, and read with the line of every key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.addons.lint.config import Config, Given
from kit.addons.lint.json_text import parse_json
from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.text import shown
from kit.specs.text_files import read_text, reason

ENDINGS = (".json", ".yaml", ".yml")
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
MOST_BYTES = 1 << 21
"""Largest configuration or script that is read, in bytes; usual files have a hundredth of it."""


def text_of(path: Path) -> str:
    """Raises ``SpecError`` where it cannot be read."""
    try:
        return read_text(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise SpecError(f"{shown(path, str)}: cannot be read: {reason(error)}") from None


def read(path: Path, given: Given | None = None) -> Config:
    """A file beside what is known of its use. Raises ``SpecError``."""
    text, is_json = text_of(path), path.suffix == ".json"
    document, irregular = parse_json(text, path.name) if is_json else (strict_yaml.parse_text(text, path.name), ())
    return replace((given or Given()).of(document), irregularities=irregular)


def read_values(path: str | Path) -> dict[str, Any]:
    """The plain values of a file, for a corrected copy."""
    return read(Path(path)).document.data


def named_file(path: Path, named: str) -> Path | None:
    """Finds a file named in another file: relative to the working directory, to that file, or to a parent directory."""
    places = [folder / named for folder in (path.parent, Path(), *path.absolute().parents[1:5])]
    return next((place for place in places if place.is_file()), None)

"""The files that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kit.addons.configs.entries import Source
from kit.addons.configs.python_entries import read_python
from kit.addons.configs.toml_entries import read_toml
from kit.addons.lint.config_files import named_file, read_values, text_of
from kit.errors import SpecError

READERS: Mapping[str, Callable[[str, str], Source]] = {".toml": read_toml, ".py": read_python}
"""A file's ending → its reader, of those whose values are dotted keys."""


def opener(path: Path) -> Callable[[str], Mapping[str, Any]]:
    """Reads the files that the one at ``path`` names, each once."""

    @cache
    def opened(named: str) -> Mapping[str, Any]:
        file, dots, function = named.partition("::")
        if (found := named_file(path, file)) is None:
            raise SpecError(f"{file}: the file is neither here nor above this one")
        if found.suffix not in READERS:
            return read_values(found)
        source = READERS[found.suffix](text_of(found), f"{found.parent.name}/{found.name}{dots}{function}")
        return {"command": source.command, **{key: entry.value for key, entry in source.entries.items()}}

    return opened


def unopened(named: str) -> Mapping[str, Any]:
    """``opener``'s of a text that came from elsewhere, whose names are none of this machine's. Raises ``SpecError``."""
    raise SpecError("no file that a dropped one names is opened; kit plan FILE opens it, where both are")

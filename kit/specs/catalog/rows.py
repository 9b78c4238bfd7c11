"""The data files beside this module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs import strict_yaml

_KEY = re.compile(r"^(?:\"([^\"\n]+)\"|([^\s#\"][^\n]*?)):[ \t]*(?:#.*)?$", flags=re.MULTILINE)
"""A line that names a row: it begins in the first column, and its values follow, indented."""


class Rows(Mapping[str, dict[str, Any]]):
    """A catalog file, by row. A row is parsed when it is asked for: a plan needs one model of a hundred."""

    def __init__(self, name: str, text: str) -> None:
        found = list(_KEY.finditer(text))
        ends = [*(match.start() for match in found[1:]), len(text)]
        self._texts: dict[str, str] = {}
        for match, end in zip(found, ends, strict=True):
            key = match[1] or match[2]
            if key in self._texts:
                raise SpecError(f"{name}: {key}: the row stands twice; keep one")
            # As many empty lines before it as stand in the file, so that a mistake is named with its line.
            self._texts[key] = "\n" * text.count("\n", 0, match.start()) + text[match.start() : end]
        self._name = name
        self._parsed: dict[str, dict[str, Any]] = {}

    def __getitem__(self, key: str) -> dict[str, Any]:
        if key not in self._parsed:
            self._parsed[key] = strict_yaml.parse_text(self._texts[key], self._name).data[key]
        return self._parsed[key]

    def __contains__(self, key: object) -> bool:
        return key in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@cache
def rows(name: str) -> Rows:
    """The rows of ``<name>.yaml``, by key, in file order. Treat them as read-only: they are shared."""
    path = Path(__file__).with_name(f"{name}.yaml")
    return Rows(path.name, path.read_text(encoding="utf-8"))

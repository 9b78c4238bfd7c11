"""TOML: every value with the place of its text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from kit.addons.configs.entries import Edit, Entry, Source, word
from kit.errors import SpecError
from kit.specs.extra import flat

_LINE = re.compile(
    r"""(?m)^[ \t]*(?:\[+[ \t]*(?P<section>[\w.-]+)[ \t]*\]+|(?P<key>[\w.-]+)[ \t]*=[ \t]*"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"(?!")|'[^'\n]*'(?!')|[\w.+:-]+|))[^\n]*"""
)
"""The line of a section's header, or of a key: its value's text is empty for lists, tables and texts of several
lines."""


def read_toml(text: str, name: str) -> Source:
    """The values of a TOML file."""
    try:
        values = flat(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{name}: {error}") from None
    places = {key: _entry(text, line, values[key]) for key, line in _lines(text) if key in values}
    return Source(name, text, "toml", {key: places.get(key, Entry(value, 0)) for key, value in values.items()})


def new_of_toml(source: Source, key: str, value: Any) -> Edit:
    """Behind the last key of its section, which is made at the end where there is none."""
    text, (section, _, last) = source.text, key.rpartition(".")
    lines = [
        line.end()
        for other, line in _lines(text)
        if other == section or (line["value"] and other.rpartition(".")[0] == section)
    ]
    if not lines:
        return len(text.rstrip()), len(text), f"\n\n[{section}]\n{last} = {toml_word(value)}\n"
    return max(lines), max(lines), f"\n{last} = {toml_word(value)}"


def toml_word(value: Any) -> str:
    """A value in TOML. A text is a basic string (toml.io/en/v1.0.0#string): JSON's escapes are TOML's, which escapes
    U+007F too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f") if isinstance(value, str) else word(value)


def _lines(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Full name of a key or a section → its line."""
    section = ""
    for line in _LINE.finditer(text):
        section = line["section"] or section
        yield f"{section}.{line['key']}".strip(".") if line["key"] else section, line


def _entry(text: str, line: re.Match[str], value: Any) -> Entry:
    """Without a place where the value has no text of its own on the line."""
    place = line.span("value") if line["value"] else (-1, -1)
    return Entry(value, text.count("\n", 0, line.start()) + 1, *place)

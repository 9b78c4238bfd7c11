"""TOML: every value with the place of its text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from kit.addons.configs.entries import Entry, Source, word
from kit.errors import SpecError
from kit.specs.extra import flat

_LINE = re.compile(
    r"""(?m)^[ \t]*(?:\[+[ \t]*(?P<section>[\w.-]+)[ \t]*\]+|(?P<key>[\w.-]+)[ \t]*=[ \t]*"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"(?!")|'[^'\n]*'(?!')|[\w.+:-]+|))"""
)
"""A section's header, or a key with its value's text, which is empty for lists, tables and texts of several lines."""


def read_toml(text: str, name: str) -> Source:
    """The values of a TOML file."""
    try:
        values = flat(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{name}: {error}") from None
    places = {key: _entry(text, line, values[key]) for key, line in _lines(text) if key in values}
    return Source(name, text, "toml", {key: places.get(key, Entry(value, 0)) for key, value in values.items()})


def with_value(text: str, key: str, value: Any) -> str:
    """The text with another value of a key: in the place of the one that it has, or behind the last one of its section,
    which is made at the end where there is none."""
    lines = dict(_lines(text))
    written = _quoted(value) if isinstance(value, str) else word(value)
    if (found := lines.get(key)) is not None:
        return text[: found.start("value")] + written + text[found.end("value") :]
    section, _, last = key.rpartition(".")
    own = {other for other, line in lines.items() if line["value"] and other.rpartition(".")[0] == section}
    siblings = [line.end() for other, line in lines.items() if other in own | {section}]
    if not siblings:
        return f"{text.rstrip()}\n\n[{section}]\n{last} = {written}\n"
    end = text.find("\n", max(siblings))
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{last} = {written}{text[end:]}"


def _quoted(text: str) -> str:
    """A basic string (toml.io/en/v1.0.0#string): JSON's escapes are TOML's, which escapes U+007F too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


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

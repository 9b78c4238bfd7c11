"""YAML in and out: strict, and with the place of every value, so that an error can name its line.

Differences from plain PyYAML: ``1e-5`` is a number (YAML 1.2) and ``20e9`` a whole one, ``on``/``off``/``yes``/``no``
and dates are strings, and a duplicate key is an error instead of a silent overwrite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kit.errors import SpecError
from kit.specs.text import MOST_NAMES, Location, dotted, escaped, first_ten, nearest, shown
from kit.specs.text_files import read_text, reason
from kit.specs.validation import adapter

_T = TypeVar("_T")


@dataclass(frozen=True)
class Document:
    """A parsed file: plain values, and the line of each."""

    name: str
    """How messages call the file."""
    data: dict[str, Any]
    lines: Mapping[Location, int]

    def where(self, location: Location) -> str:
        """``file:line`` of the nearest enclosing value that has a line."""
        while location and location not in self.lines:
            location = location[:-1]
        line = self.lines.get(location)
        return escaped(self.name) + (f":{line}" if line else "")

    @contextmanager
    def at(self, location: Location) -> Iterator[None]:
        """Says of a ``SpecError`` in which file and line it is, and under which key."""
        try:
            yield
        except SpecError as error:
            raise SpecError(f"{self.where(location)}: {dotted(location)}: {error}") from None


def parse_text(text: str, name: str) -> Document:
    """YAML text → a document whose top level is a mapping. Raises ``SpecError``."""
    from kit.specs import yaml_dialect  # PyYAML: a plan of catalog names reads no YAML

    data, lines = yaml_dialect.load(text, name)
    if not isinstance(data, dict):
        raise SpecError(f"{name}: holds a {type(data).__name__} where a mapping of keys is expected")
    return Document(name=name, data=data, lines=lines)


def read(path: Path) -> Document:
    """Read a YAML file. Raises ``SpecError`` where it is missing or malformed."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{escaped(str(path))}: cannot be read: {reason(error)}") from None
    return parse_text(text, escaped(path.name))


def dump(data: Mapping[str, Any]) -> str:
    """Plain values → YAML text, keys in the order given, one deterministic spelling."""
    from kit.specs import yaml_dialect

    return yaml_dialect.dump_text(dict(data))


def to_plain(value: Any) -> Any:
    """A spec (or any nesting of them) → dicts, lists and scalars."""
    return adapter(type(value)).dump_python(value, mode="json")


def parse(kind: type[_T], data: Any, document: Document, location: Location = ()) -> _T:
    """Plain values → a validated spec; the first ten problems are reported, one line each, and the others counted.

    Raises ``SpecError``. JSON mode is what lets a strict model take a list for a tuple.
    """
    from pydantic import ValidationError  # imported where values are read: see kit.specs.validation

    try:
        value: _T = adapter(kind).validate_json(json.dumps(data))
        return value
    except ValidationError as error:
        items = error.errors(include_url=False)
        problems = first_ten(document.name, items, lambda item: _explain(kind, item, document, location))
        raise SpecError("\n".join(problems)) from None
    except SpecError as error:
        raise SpecError(f"{document.where(location)}: {error}") from None


def _explain(kind: Any, item: Any, document: Document, prefix: Location) -> str:
    inner: Location = tuple(item["loc"])
    location = (*prefix, *inner)
    where = f"{document.where(location)}: {dotted(location) or 'top level'}"
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where}: unknown key; {nearest(str(location[-1]), _valid_keys(kind, inner[:-1]))}"
    if item["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where}: is required and missing"
    message = item["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if item["type"] == "literal_error":
        text = shown(item["input"], str)
        options = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        if len(options) > MOST_NAMES:
            return f"{where}={escaped(text)}: {nearest(text, options)}"
        return f"{where}={escaped(text)}: {message}" + (f"; {nearest(text, options)}" if len(options) > 2 else "")
    return f"{where}={shown(item['input'])}: {message}"


def _valid_keys(kind: Any, location: Location) -> list[str]:
    """Field names of the dataclass at a location inside ``kind``."""
    for step in location:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            continue
        kind = get_type_hints(kind).get(str(step)) if is_dataclass(kind) else None
        options = [arg for arg in get_args(kind) if is_dataclass(arg) and get_origin(kind) is not dict]
        kind = options[0] if options else kind
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []

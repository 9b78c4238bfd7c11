"""YAML in and out: strict, and with the place of every value, so that an error can name its line.

Differences from plain PyYAML: ``1e-5`` is a number (YAML 1.2) and ``20e9`` a whole one, ``on``/``off``/``yes``/``no``
are strings, and a duplicate key is an error instead of a silent overwrite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from kit.errors import SpecError
from kit.specs.text import escaped, nearest

T = TypeVar("T")
Location = tuple[str | int, ...]

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # the C loader has no stubs
    """PyYAML's safe loader with YAML 1.2 numbers and booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
    ]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_FLOAT: tuple[str, re.Pattern[str], list[str]] = (
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(*_FLOAT)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that YAML 1.2 reads as a number too (``1e5``)."""


_Dumper.add_implicit_resolver(*_FLOAT)


def _number(loader: Any, node: yaml.ScalarNode) -> float | int:
    """A whole number with an exponent is an integer, as people mean ``total_tokens: 20e9``."""
    text = loader.construct_scalar(node)
    value = float(loader.construct_yaml_float(node))
    whole = re.fullmatch(r"[+]?[0-9.]+[eE][+]?[0-9]+", text) and value.is_integer()
    return int(value) if whole else value


_Loader.add_constructor("tag:yaml.org,2002:float", _number)


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


def parse_text(text: str, name: str) -> Document:
    """YAML text → a document whose top level is a mapping. Raises ``SpecError``."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            lines: dict[Location, int] = {}
            _walk(root, (), lines, name)
            data = loader.construct_document(root) if root is not None else {}
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{name}{line}: not valid YAML: {problem}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{name}: holds a {type(data).__name__} where a mapping of keys is expected")
    return Document(name=name, data=data, lines=lines)


def read(path: Path) -> Document:
    """Read a YAML file. Raises ``SpecError`` where it is missing or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{path}: cannot be read: {reason}") from None
    return parse_text(text, path.name)


def dump(data: Mapping[str, Any]) -> str:
    """Plain values → YAML text, keys in the order given, one deterministic spelling."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )


def to_plain(value: Any) -> Any:
    """A spec (or any nesting of them) → dicts, lists and scalars."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def parse(kind: type[T], data: Any, document: Document, location: Location = ()) -> T:
    """Plain values → a validated spec; every problem is reported, one line each.

    Raises ``SpecError``. JSON mode is what lets a strict model take a list for a tuple.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(data))
    except ValidationError as error:
        raise SpecError("\n".join(_explain(kind, item, document, location) for item in error.errors())) from None
    except SpecError as error:
        raise SpecError(f"{document.where(location)}: {error}") from None


def _walk(node: Any, location: Location, lines: dict[Location, int], name: str) -> None:
    if node is None:
        return
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*location, key.value)
            if inner in lines:
                raise SpecError(
                    f"{name}:{key.start_mark.line + 1}: {_dotted(inner)}: the key stands twice "
                    f"(first in line {lines[inner]}); keep one"
                )
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*location, index), lines, name)


def _explain(kind: Any, item: Any, document: Document, prefix: Location) -> str:
    inner: Location = tuple(item["loc"])
    location = (*prefix, *inner)
    where = f"{document.where(location)}: {_dotted(location) or 'top level'}"
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where}: unknown key; {nearest(str(location[-1]), _valid_keys(kind, inner[:-1]))}"
    if item["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where}: is required and missing"
    message = item["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if item["type"] == "literal_error":
        text = str(item["input"])
        options = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{where}={escaped(text)}: {message}" + (f"; {nearest(text, options)}" if len(options) > 2 else "")
    return f"{where}={item['input']!r}: {message}"


def _valid_keys(kind: Any, location: Location) -> list[str]:
    """Field names of the dataclass at a location inside ``kind``."""
    for step in location:
        kind = get_type_hints(kind).get(str(step)) if is_dataclass(kind) else None
        options = [arg for arg in get_args(kind) if is_dataclass(arg)]
        kind = options[0] if options else kind
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def _dotted(location: Location) -> str:
    return ".".join(escaped(str(part)) for part in location)

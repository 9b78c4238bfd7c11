"""PyYAML's safe loader and dumper, with the numbers and booleans of YAML 1.2, and the line of every value."""

from __future__ import annotations

import re
from typing import Any

import yaml

from kit.errors import SpecError
from kit.specs.text import Location, dotted, shown
from kit.specs.text_files import DEEPEST, LONGEST_NUMBER

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # the C loader has no stubs
    """PyYAML's safe loader with YAML 1.2 numbers and booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp)
        for tag, regexp in resolvers
        if tag.removeprefix("tag:yaml.org,2002:") not in ("float", "bool", "timestamp")  # a date is text
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


_MOST_VALUES = 50_000
"""Values of a document, those counted again that an alias repeats. A plan of 16,384 GPUs has 2,000."""
_LARGEST_WHOLE = 2.0**63
_TOO_LARGE = f"more than {_MOST_VALUES} values (aliases repeat theirs), or nested more than {DEEPEST} levels deep"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_PLAIN = (*_NUMBERS, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "bool", "null", "seq", "map")))

_MERGE = "tag:yaml.org,2002:merge"


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that YAML 1.2 reads as a number too (``1e5``)."""


_Dumper.add_implicit_resolver(*_FLOAT)


def _number(loader: Any, node: yaml.ScalarNode) -> float | int:
    """A whole number with an exponent is an integer, as people mean ``total_tokens: 20e9``."""
    text = loader.construct_scalar(node)
    value = float(loader.construct_yaml_float(node))
    whole = re.fullmatch(r"[+]?[0-9.]+[eE][+]?[0-9]+", text) and value.is_integer() and value < _LARGEST_WHOLE
    return int(value) if whole else value


_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def load(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    """YAML text → plain values, and the line of each. Raises ``SpecError`` with the file's ``name``."""
    try:
        _check_size(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            lines = _Lines(name)
            lines.walk(root, ())
            return (loader.construct_document(root) if root is not None else {}), lines.found
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{name}{line}: not valid YAML: {shown(problem, str)}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise SpecError(
            f"{name}: not valid YAML: a tag (!!int, !!bool) stands before a value that is none; leave out the tag"
        ) from None


def _check_size(text: str) -> None:
    """Raises YAMLError for text that is nested too deeply for PyYAML's composer, which is recursive C, or has more
    values than memory and time should go to."""
    events, depth, loader = 0, 0, _Loader(text)
    try:
        while loader.check_event():
            event = loader.get_event()
            events += 1
            opens, closes = isinstance(event, yaml.CollectionStartEvent), isinstance(event, yaml.CollectionEndEvent)
            depth += opens - closes
            if depth > DEEPEST or events > 2 * _MOST_VALUES:
                raise yaml.MarkedYAMLError(None, None, _TOO_LARGE, event.start_mark)
    finally:
        loader.dispose()


def dump_text(data: Any) -> str:
    """Plain values → YAML text, keys in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)


class _Lines:
    """The line of every value, found by a walk through the nodes that counts what aliases repeat."""

    def __init__(self, name: str) -> None:
        self.name, self.found, self.values = name, dict[Location, int](), 0

    def walk(self, node: Any, location: Location) -> None:
        """Raises SpecError for a key that is there twice, and YAMLError for what is no plain value."""
        if node is None:
            return
        self.values += 1
        if self.values > _MOST_VALUES or len(location) > DEEPEST:
            raise yaml.MarkedYAMLError(None, None, _TOO_LARGE, node.start_mark)
        if node.tag not in _PLAIN:
            tag = shown(node.tag.removeprefix("tag:yaml.org,2002:"), str)
            raise yaml.MarkedYAMLError(
                None, None, f"a value of type {tag}; write text, a number, a list or a mapping", node.start_mark
            )
        self.found.setdefault(location, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._key(key, location)
                self.walk(value, (*location, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self.walk(value, (*location, index))
        elif node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise yaml.MarkedYAMLError(None, None, f"a number of {len(node.value)} characters", node.start_mark)

    def _key(self, key: Any, location: Location) -> None:
        line = key.start_mark.line + 1
        plain = isinstance(key, yaml.ScalarNode) and key.tag in (*_PLAIN, _MERGE)
        if not plain or (key.tag in _NUMBERS and len(key.value) > LONGEST_NUMBER):
            raise yaml.MarkedYAMLError(None, None, "a key that is no text", key.start_mark)
        inner = (*location, key.value)
        if inner in self.found:
            raise SpecError(
                f"{self.name}:{line}: {dotted(inner)}: the key is there twice (first in line {self.found[inner]}); "
                "keep one"
            )
        self.found[inner] = line

"""PyYAML's safe loader and dumper, with the numbers and booleans of YAML 1.2, and the line of every value."""

from __future__ import annotations

import re
from typing import Any

import yaml

from kit.errors import SpecError
from kit.specs.text import Location, dotted

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


def load(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    """YAML text → plain values, and the line of each. Raises ``SpecError`` with the file's ``name``."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            lines: dict[Location, int] = {}
            _walk(root, (), lines, name)
            return (loader.construct_document(root) if root is not None else {}), lines
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecError(f"{name}{line}: not valid YAML: {problem}") from None


def dump_text(data: Any) -> str:
    """Plain values → YAML text, keys in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)


def _walk(node: Any, location: Location, lines: dict[Location, int], name: str) -> None:
    if node is None:
        return
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*location, key.value)
            if inner in lines:
                raise SpecError(
                    f"{name}:{key.start_mark.line + 1}: {dotted(inner)}: the key is there twice "
                    f"(first in line {lines[inner]}); keep one"
                )
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*location, index), lines, name)

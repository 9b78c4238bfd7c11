"""JSON schema of a recipe file, for editors: ``python -m kit.specs.schema``.

Descriptions are the docstrings of the specs and the strings beneath their fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from itertools import pairwise
from types import NoneType
from typing import Any

from kit.specs.base import Kind, kinds
from kit.specs.frozen import FrozenMap
from kit.specs.recipe import RecipeFile
from kit.specs.strict_yaml import to_plain

_NAMES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def json_schema() -> dict[str, Any]:
    """Draft 2020-12."""
    parts: dict[str, Any] = {}
    whole = _object(RecipeFile, parts)
    # A variant says only what differs; what is missing in the whole is found when it is loaded.
    for part in (whole, parts["RunSpec"], parts["DataSpec"]):
        part.pop("required", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": dict(sorted(parts.items())),
        **whole,
        "title": "kit recipe",
    }


def _object(cls: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of one spec; those that it holds are added to ``parts``."""
    described, properties = _strings_beneath(cls), {}
    required = []
    for item in dataclasses.fields(cls):
        properties[item.name] = part = _value(kinds(cls)[item.name], parts)
        if item.default is dataclasses.MISSING:
            required.append(item.name)
        else:
            part["default"] = to_plain(item.default)
        if item.name in described:
            part["description"] = described[item.name]
    found = {"title": cls.__name__, "description": inspect.getdoc(cls), "type": "object", "properties": properties}
    return {**found, "additionalProperties": False, **({"required": required} if required else {})}


def _value(kind: Kind, parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of what a field may hold."""
    options: list[dict[str, Any]] = []
    for each in kind.types:
        if dataclasses.is_dataclass(each):
            if each.__name__ not in parts:
                parts[each.__name__] = {}  # it may hold another of its own kind
                parts[each.__name__] = _object(each, parts)
            options.append({"$ref": f"#/$defs/{each.__name__}"})
        elif kind.item is not None:
            options.append({"type": "array", "items": _value(kind.item, parts)})
        elif each is FrozenMap:
            options.append({"type": "object"})
        else:
            limits = {} if each is NoneType else {_LIMITS[key]: bound for key, bound in kind.limits}
            enum = {"enum": list(kind.choices)} if kind.choices and each is not NoneType else {}
            options.append({"type": _NAMES[each], **limits, **enum})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _strings_beneath(spec: type) -> dict[str, str]:
    """Field → the string literal that follows it in the source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(spec))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(str(after.value.value))
    return found


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))

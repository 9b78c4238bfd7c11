"""What every spec shares: frozen, keyword-only, and checked whenever one is made.

``@spec`` makes a standard dataclass and checks each value against the field's type and limits: ``dataclasses.replace``
checks again. Unknown keys are refused, text stays on one line, a mapping stands for a nested spec, a list for a tuple
and a whole number for a float; nothing else is converted. The string beneath a field is its documentation in the JSON
schema too (``kit/specs/schema.py``).

The checker is kit's own because importing a general one takes longer than making a plan.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from kit.errors import SpecError
from kit.specs.frozen import FrozenMap
from kit.specs.text import control_character, escaped, nearest

T = TypeVar("T")
Location = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""

LIMITS = {
    "gt": (operator.gt, "greater than"),
    "ge": (operator.ge, "greater than or equal to"),
    "lt": (operator.lt, "less than"),
    "le": (operator.le, "less than or equal to"),
}
_WORDS = {
    bool: "a valid boolean",
    int: "a valid integer",
    float: "a valid number",
    str: "a valid string",
    tuple: "a list",
}


def Field(*, default: Any = dataclasses.MISSING, **limits: float) -> Any:
    """A number with limits: any of ``gt``, ``ge``, ``lt``, ``le``."""
    return dataclasses.field(default=default, metadata=limits)


class Kind(NamedTuple):
    """What a field may hold."""

    types: tuple[type, ...]
    """Types of its values; ``NoneType`` among them where it may be null."""
    choices: tuple[Any, ...] = ()
    """All its values, of a ``Literal``."""
    item: Kind | None = None
    """What an element of a tuple or a value of a mapping may be."""
    limits: tuple[tuple[str, float], ...] = ()
    """Of a number: keys of ``LIMITS``, each with its bound."""


_TEXT = Kind((str,))
_PLAIN = (bool, NoneType)
"""Types of which every value fits."""


class Problem(NamedTuple):
    """Why a value is refused."""

    location: Location
    shown: str
    """``=value``, or nothing where the key is the problem."""
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(escaped(str(step)) for step in self.location)}{self.shown}: {self.message}"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field, dataclasses.field))
def spec(cls: type[T]) -> type[T]:
    """Class decorator. A value that does not fit raises ``SpecError`` with every problem, one line each."""
    own_check = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        values, problems = self.__dict__, list[Problem]()
        for name, kind in kinds(type(self)).items():
            value = values[name]
            if type(value) not in kind.types or not (type(value) in _PLAIN or value in kind.choices):
                values[name] = fit(kind, value, (name,), problems)  # the other values need no call: searches are long
        if problems:
            raise SpecError("\n".join(f"{cls.__name__}: {problem}" for problem in problems))
        if own_check is not None:
            own_check(self)

    def __hash__(self: Any) -> int:
        values = self.__dict__
        if "_hash" not in values:
            values["_hash"] = hash(tuple(values[name] for name in kinds(type(self))))
        return int(values["_hash"])

    def __getstate__(self: Any) -> dict[str, Any]:
        """Only the fields: what else is kept was worked out from them, and a hash differs between processes."""
        return {name: self.__dict__[name] for name in kinds(type(self))}

    for method in (__post_init__, __hash__, __getstate__):
        setattr(cls, method.__name__, method)
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


_KINDS: dict[Any, Mapping[str, Kind]] = {}


def kinds(cls: Any) -> Mapping[str, Kind]:
    """Field → what it may hold."""
    if cls not in _KINDS:
        hints = get_type_hints(cls)
        _KINDS[cls] = {
            item.name: kind_of(hints[item.name])._replace(limits=tuple(item.metadata.items()))
            for item in dataclasses.fields(cls)
        }
    return _KINDS[cls]


def kind_of(annotation: Any) -> Kind:
    """A type annotation → what it allows."""
    types: list[type] = []
    choices: tuple[Any, ...] = ()
    item = None
    for option in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        origin, inner = get_origin(option), get_args(option)
        if origin is Literal:
            choices = inner
            types.append(type(inner[0]))
        elif origin is None or origin is Mapping:
            types.append(FrozenMap if origin else option)
        else:
            item = kind_of(inner[-1] if origin is dict else inner[0])
            types.append(origin)
    return Kind(tuple(types), choices, item)


def fit(kind: Kind, value: Any, location: Location, problems: list[Problem]) -> Any:
    """The value as the field holds it; what is wrong with it is added to ``problems``."""
    if type(value) not in kind.types:
        if isinstance(value, dict) and dataclasses.is_dataclass(kind.types[0]):
            return _build(kind.types[0], value, location, problems)
        if type(value) is int and float in kind.types:
            value = float(value)
        elif type(value) is list and tuple in kind.types:
            value = tuple(value)
        elif isinstance(value, dict) and FrozenMap in kind.types:
            value = FrozenMap(value)
    if kind.item is not None and type(value) is tuple:
        return tuple(fit(kind.item, each, (*location, index), problems) for index, each in enumerate(value))
    if kind.item is not None and type(value) is dict:
        return {
            fit(_TEXT, key, location, problems): fit(kind.item, inner, (*location, key), problems)
            for key, inner in value.items()
        }
    if message := _refusal(kind, value):
        shown = escaped(str(value)) if kind.choices else repr(value)
        problems.append(Problem(location, f"={shown}", message))
    return value


def _refusal(kind: Kind, value: Any) -> str | None:
    """What is wrong with a value that has no parts of its own."""
    if kind.choices and not (value is None and NoneType in kind.types):
        if type(value) in kind.types and value in kind.choices:
            return None
        listed = " or ".join(map(repr, kind.choices[-2:]))
        listed = ", ".join([*map(repr, kind.choices[:-2]), listed])
        return f"should be {listed}" + (f"; {nearest(str(value), kind.choices)}" if len(kind.choices) > 2 else "")
    if type(value) not in kind.types:
        return f"should be {_WORDS.get(kind.types[0], 'a mapping of keys')}"
    for key, bound in kind.limits if value is not None else ():
        fits, words = LIMITS[key]
        if not fits(value, bound):
            return f"should be {words} {bound}"
    return next(filter(None, map(control_character, _texts(value))), None)


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in (*value, *(value.values() if isinstance(value, dict) else ())):
            yield from _texts(inner)


def _build(cls: Any, data: Mapping[str, Any], location: Location, problems: list[Problem]) -> Any:
    """A mapping → the spec that it describes."""
    known, count = kinds(cls), len(problems)
    for key in data:
        if key not in known:
            problems.append(Problem((*location, key), "", f"unknown key; {nearest(str(key), known)}"))
    values = {name: fit(kind, data[name], (*location, name), problems) for name, kind in known.items() if name in data}
    for item in dataclasses.fields(cls):
        if item.name not in data and item.default is item.default_factory is dataclasses.MISSING:
            problems.append(Problem((*location, item.name), "", "is required and missing"))
    return cls(**values) if len(problems) == count else None

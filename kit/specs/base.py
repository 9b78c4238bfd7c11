"""What every spec shares: frozen, keyword-only, strictly typed, unknown keys refused, text that stays on one line.

Whoever makes a spec from values, ``dataclasses.replace`` included, has them validated by pydantic. Pydantic is imported
by the first value that needs it: defaults and the rows of the catalog are known to be good (a test validates them), so
a plan of catalog names does without, and takes half the time. The string beneath each field is its documentation in the
JSON schema too (``kit/specs/schema.py``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform

from kit.specs.frozen import FrozenMap
from kit.specs.text import control_character

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, PydanticCustomError

T = TypeVar("T")

SPEC = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""Pydantic configuration of every spec: no number is infinite or NaN."""


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: Any) -> TypeAdapter[Any]:
    """Pydantic's reader and writer of a type, built once."""
    if kind not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(kind: type[T]) -> type[T]:
    """Makes a class a frozen, keyword-only dataclass. Values that are wrong raise ``pydantic.ValidationError``."""
    kind.__pydantic_config__ = SPEC  # type: ignore[attr-defined]
    made = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    unchecked = made.__init__

    @wraps(unchecked)
    def init(self: Any, **values: Any) -> None:
        if values or not complete:
            from pydantic_core import ArgsKwargs

            adapter(type(self)).validator.validate_python(ArgsKwargs((), values), self_instance=self)
        else:
            unchecked(self)

    complete = all(field.default is not dataclasses.MISSING for field in dataclasses.fields(made))  # type: ignore[arg-type]
    made.__init__ = init  # type: ignore[method-assign]
    return made


def trusted(kind: type[T], values: Mapping[str, Any]) -> T:
    """A spec of values that were validated before, such as those of the catalog."""
    made = object.__new__(kind)
    kind.__init__.__wrapped__(made, **values)  # type: ignore[attr-defined]
    return made


def changed(value: T, **values: Any) -> T:
    """Like ``dataclasses.replace``, for values that kit itself worked out: they are not validated."""
    kept = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    return trusted(type(value), kept | values)


class Within:
    """Bounds of a number, as of pydantic's ``Field``."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        whole = handler(source)
        number: Any = whole
        while "schema" in number:  # inside of its checks
            number = number["schema"]
        number.update(self._bounds)
        return whole


class Checked:
    """A check of a value that has the right type: it returns the value to keep, or raises."""

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self._check = check

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self._check, handler(source))


_LONGEST = 4096
"""Characters of a text, as many as Linux takes for a path (PATH_MAX)."""
_LONGEST_NAME = 255
"""Bytes of a name, as many as file systems take (NAME_MAX): run directories and Slurm's jobs are named so."""
_LEAST_RATE = 1e-6
"""A speed below it is a mistake, and times that are divided by it are beyond any float."""
LARGEST_RATE = 1e6
"""GB/s or TFLOP/s of a GPU or a node: a hundred times what any has."""


def _refuse(problem: str) -> PydanticCustomError:
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("value", "{problem}", {"problem": problem})


def _line(text: str) -> str:
    if problem := control_character(text):
        raise _refuse(problem)
    if len(text) > _LONGEST:
        raise _refuse(f"has {len(text)} characters where at most {_LONGEST} fit; shorten it")
    return text


def _name(text: str) -> str:
    if (length := len(text.encode(errors="replace"))) > _LONGEST_NAME:
        raise _refuse(f"has {length} bytes where a file's name has at most {_LONGEST_NAME}; shorten it")
    return text


def _rate(value: float) -> float:
    if 0 < value < _LEAST_RATE:
        raise _refuse(f"should be 0 or at least {_LEAST_RATE}")
    return value


def _lines_within(value: Any) -> Any:
    if isinstance(value, str):
        _line(value)
    elif isinstance(value, int | float):
        if not abs(value) <= sys.float_info.max:
            raise _refuse(f"holds {value}, which is no finite number")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _lines_within(key)
            _lines_within(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _lines_within(inner)
    return value


Text = Annotated[str, Checked(_line)]
"""Every text of a spec: without control characters, so that no value becomes a line of its own in an emitted file."""
Name = Annotated[Text, Checked(_name)]
"""A text that files are named after."""
Rate = Annotated[float, Within(ge=0, le=LARGEST_RATE), Checked(_rate)]
"""GB/s or TFLOP/s; 0 where there is none."""
TextMapping = Annotated[dict[str, Any], Checked(_lines_within), Checked(FrozenMap)]
"""Keys and values as another program has them, at any depth; their text as ``Text``."""

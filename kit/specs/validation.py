"""Validation of specs: frozen, keyword-only, strictly typed dataclasses that refuse unknown keys and multi-line text.

pydantic validates the values of every new spec, also with ``dataclasses.replace``. It is imported only when a value
needs validation. Defaults and catalog rows need none (a test validates them), so a plan of catalog names does not
import pydantic and takes half the time. What follows from a spec's values is a property, often ``cached``. The string
beneath each field is also its description in the JSON schema (``scripts/recipe_schema.py``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pydantic_core import CoreSchema
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Generic, Self, TypeVar, dataclass_transform, overload

from kit.specs.text import control_character

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, PydanticCustomError


class FrozenMap(dict[str, Any]):
    """JSON values or specs by name. It behaves as a dict; lists are stored as tuples."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: _frozen(value) for key, value in values.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=hash))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, Any]]]:
        return FrozenMap, (dict(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        """For the JSON schema of a field's default."""
        from pydantic_core.core_schema import dict_schema

        return dict_schema()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a spec never changes; make another one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return FrozenMap(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def thawed(values: dict[str, Any]) -> dict[str, Any]:
    """Copies frozen values to dicts and lists, for programs that need these types."""
    return {key: _plain(value) for key, value in values.items()}


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
def stored(kind: type[T]) -> type[T]:
    """Makes a class a frozen, keyword-only dataclass that is validated where one is read from a file, and nowhere
    else."""
    kind.__pydantic_config__ = SPEC  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(kind)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(kind: type[T]) -> type[T]:
    """Makes a class a frozen, keyword-only dataclass that is validated wherever one is made. Invalid values raise
    ``pydantic.ValidationError``."""
    made = stored(kind)
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
    """Makes a spec without validation, from values that are known to be valid, such as catalog rows."""
    made = object.__new__(kind)
    kind.__init__.__wrapped__(made, **values)  # type: ignore[attr-defined]
    return made


def changed(value: T, **values: Any) -> T:
    """``dataclasses.replace`` without validation, for values that kit computed."""
    kept = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    return trusted(type(value), kept | values)


class cached(Generic[T]):
    """A property that is computed at its first access, and stored in the instance. Two threads may both compute it:
    ``functools.cached_property`` of Python 3.11 takes a lock at every first access, which is a tenth of a search."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found


class Within:
    """Bounds of a number, with the meaning of pydantic's ``Field``."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        whole = handler(source)
        number: Any = whole
        while "schema" in number:  # inside of its checks
            number = number["schema"]
        number.update(self._bounds)
        return whole


class Count(Within):
    """Bounds of a whole number that people write: it may be text, as ``as_count`` reads it. A number in a file that
    kit alone writes is ``Within``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_count, super().__get_pydantic_core_schema__(source, handler))


class Checked:
    """A check of a value that already has the right type. The function returns the value to store, or raises."""

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self._check = check

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self._check, handler(source))


_LONGEST = 4096
"""Most characters of a text: the longest path of Linux (PATH_MAX)."""
_LONGEST_NAME = 255
"""Most bytes of a name: the longest file name (NAME_MAX), since names become directories and Slurm jobs."""
_LEAST_RATE = 1e-6
"""A smaller speed is a mistake, and dividing by it would overflow."""
LARGEST_RATE = 1e6
"""Largest GB/s or TFLOP/s of a GPU or node: a hundred times that of today's largest."""


def _refuse(problem: str) -> PydanticCustomError:
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("value", "{problem}", {"problem": problem})


def _count(value: Any) -> Any:
    if not isinstance(value, str | float):
        return value
    from kit.specs.count import as_count  # most counts are whole numbers already

    try:
        return as_count(value)
    except ValueError as error:
        raise _refuse(str(error)) from None


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
"""Any text of a spec, without control characters, so that no value can add a line to an emitted file."""
Name = Annotated[Text, Checked(_name)]
"""A text that is used in file names."""
Rate = Annotated[float, Within(ge=0, le=LARGEST_RATE), Checked(_rate)]
"""GB/s or TFLOP/s; 0 if the hardware lacks it."""
TextMapping = Annotated[dict[str, Any], Checked(_lines_within), Checked(FrozenMap)]
"""A nested mapping in another program's format; every text in it is a ``Text``."""

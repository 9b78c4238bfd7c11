"""What every spec shares: frozen, keyword-only, strictly typed, unknown keys refused, text that stays on one line.

A spec is a pydantic dataclass, so ``dataclasses.replace`` validates again. The string beneath each field is its
documentation in the JSON schema too (``kit/specs/schema.py``).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kit.specs.frozen import FrozenMap
from kit.specs.text import control_character

SPEC = ConfigDict(extra="forbid", strict=True, defer_build=True, allow_inf_nan=False)
"""Pydantic configuration of every spec: no number is infinite or NaN. A validator is built
when the first value is made: a plan needs few of them."""


_LONGEST = 4096
"""Characters of a text, as many as Linux takes for a path (PATH_MAX)."""
_LONGEST_NAME = 255
"""Bytes of a name, as many as file systems take (NAME_MAX): run directories and Slurm's jobs are named so."""
_LEAST_RATE = 1e-6
"""A speed below it is a mistake, and times that are divided by it are beyond any float."""
LARGEST_RATE = 1e6
"""GB/s or TFLOP/s of a GPU or a node: a hundred times what any has."""


def _refuse(problem: str) -> PydanticCustomError:
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


Text = Annotated[str, AfterValidator(_line)]
"""Every text of a spec: without control characters, so that no value becomes a line of its own in an emitted file."""
Name = Annotated[Text, AfterValidator(_name)]
"""A text that files are named after."""
Rate = Annotated[float, Field(ge=0, le=LARGEST_RATE), AfterValidator(_rate)]
"""GB/s or TFLOP/s; 0 where there is none."""
TextMapping = Annotated[dict[str, Any], AfterValidator(_lines_within), AfterValidator(FrozenMap)]
"""Keys and values as another program has them, at any depth; their text as ``Text``."""

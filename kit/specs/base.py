"""What every spec shares: frozen, keyword-only, strictly typed, unknown keys refused, text that stays on one line.

A spec is a pydantic dataclass, so ``dataclasses.replace`` validates again. The string beneath each field is its
documentation in the JSON schema too (``kit/specs/schema.py``).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

from kit.specs.frozen import FrozenMap
from kit.specs.text import control_character

SPEC = ConfigDict(extra="forbid", strict=True, defer_build=True)
"""Pydantic configuration of every spec. A validator is built when the first value is made: a plan needs few of them."""


def _line(text: str) -> str:
    if problem := control_character(text):
        raise PydanticCustomError("control_character", "{problem}", {"problem": problem})
    return text


def _lines_within(value: Any) -> Any:
    if isinstance(value, str):
        _line(value)
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
TextMapping = Annotated[dict[str, Any], AfterValidator(_lines_within), AfterValidator(FrozenMap)]
"""Keys and values as another program has them, at any depth; their text as ``Text``."""

"""What every spec shares: frozen, keyword-only, strictly typed, unknown keys refused, text that stays on one line.

A spec is a pydantic dataclass, so ``dataclasses.replace`` validates again. The string beneath each field is its
documentation in the JSON schema too (``kit/specs/schema.py``).
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

from kit.errors import SpecError
from kit.specs.frozen import FrozenMap

SPEC = ConfigDict(extra="forbid", strict=True)
"""Pydantic configuration of every spec."""

_REFUSED = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: C0, DEL and C1 controls, lone surrogates, U+2028, U+2029. Every line break is among them."""
_RULE = (
    "holds the control character {found}; text goes into scripts and configuration files, where it must not begin a "
    "line of its own: write it on one line, without control characters"
)


def check_line(name: str, text: str) -> None:
    """Raises SpecError where ``text`` holds a control character. ``name``: what the message calls the value."""
    if found := _control_character(text):
        raise SpecError(f"{name}={text!r}: {_RULE.format(found=found)}")


def escaped(text: str) -> str:
    """``text`` for a message of one line: as it is where all of it can be printed."""
    return text if text.isprintable() else repr(text)[1:-1]


def _control_character(text: str) -> str | None:
    found = next((char for char in text if unicodedata.category(char) in _REFUSED), None)
    return None if found is None else f"U+{ord(found):04X}"


def _line(text: str) -> str:
    if found := _control_character(text):
        raise PydanticCustomError("control_character", _RULE, {"found": found})
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

"""The values of a file with the place of each, whatever form the file has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Form = Literal["yaml", "json", "toml", "shell", "python"]
Edit = tuple[int, int, str]
"""Where a piece of a text begins and ends, and what comes in its place."""


class Unresolved(str):
    """What stands in the place of a value that is not known: Python's own text, as of a call its name."""


UNRESOLVED = Unresolved("a variable that the script does not set")


@dataclass(frozen=True)
class Entry:
    """A value, and where its text is."""

    value: Any
    """Plain; of a script text, a list of them, True for a flag alone; or ``Unresolved``."""
    line: int
    start: int = -1
    """Place of the value's text in the file's; −1 where it has none of its own."""
    end: int = -1


@dataclass(frozen=True)
class Source:
    """A file: its text, and its values by dotted key."""

    name: str
    text: str
    form: Form
    entries: Mapping[str, Entry]
    command: str = ""
    """The words of a script that start the training, such as ``swift sft``; the call that a Python function returns."""
    end: int = -1
    """The place behind the last word of a script's command."""
    flags: str = ""
    """How a command writes flags, by its program's table."""

    def with_values(self, values: Mapping[str, Any]) -> Source:
        """With other values, as if the file had them. Its text stays."""
        own = {key: replace(self.entries.get(key, Entry(None, 0)), value=value) for key, value in values.items()}
        return replace(self, entries={**self.entries, **own})


def word(value: Any) -> str:
    """A value as the tables write it: ``true``, ``null``, ``8``, ``bf16``."""
    if value is None or value == "":
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).strip()

"""Text that a user gives: kept on one line, shown in messages, and compared with the names that are valid."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kit.errors import KitError, SpecError

Item = TypeVar("Item")
Location = tuple[str | int, ...]
"""Keys and positions that lead to a value of a document."""

LONGEST_SHOWN = 200
"""Characters of a value that a message repeats."""
MOST_NAMES = 5
"""Names that a message lists."""
_REFUSED = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: C0, DEL and C1 controls, lone surrogates, U+2028, U+2029. Every line break is among them."""


def control_character(text: str) -> str | None:
    """What is wrong with a text that holds a control character, which could begin a line of its own in a script."""
    if text.isprintable():
        return None
    found = next((char for char in text if unicodedata.category(char) in _REFUSED), None)
    if found is None:
        return None
    return (
        f"holds the control character U+{ord(found):04X}; text goes into scripts and configuration files, where it "
        "must not begin a line of its own: write it on one line, without control characters"
    )


def check_line(name: str, text: str) -> None:
    """Raises SpecError where ``text`` holds a control character. ``name``: what the message calls the value."""
    if problem := control_character(text):
        raise SpecError(f"{name}={shown(text)}: {problem}")


def escaped(text: str) -> str:
    """``text`` for a message of one line: as it is where all of it can be printed."""
    return text if text.isprintable() else repr(text)[1:-1]


def shown(value: Any, spelling: Callable[[Any], str] = repr) -> str:
    """A value for a message, on one line and not longer than one."""
    text = escaped(spelling(value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}… ({len(text)} characters)"


def first_ten(file: str, problems: Sequence[Item], line: Callable[[Item], str]) -> list[str]:
    """A line for each of the first ten problems, and one that counts the others."""
    more = len(problems) - 10
    return [line(each) for each in problems[:10]] + ([f"{escaped(file)}: and {more} more problems"] if more > 0 else [])


def listed(names: Iterable[str], between: str = ", ") -> str:
    """Names for a message: five of them, each as short as ``shown`` makes it, and how many more there are."""
    first = list(names)
    more = len(first) - MOST_NAMES
    return between.join(shown(name, str) for name in first[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def one_of(values: Iterable[object]) -> str:
    """``1, 2 or 4``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def alike(word: str, valid: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """The valid names that are like the word, the most alike first."""
    from difflib import get_close_matches  # only a mistake needs it

    names = {name.lower(): name for name in valid}
    return [names[name] for name in get_close_matches(word[:LONGEST_SHOWN].lower(), names, most, cutoff)]


def nearest(word: str, valid: Iterable[str]) -> str:
    """``did you mean X?``, or the valid names; of more than five those that are most like the word."""
    names = list(valid)
    if close := alike(word, names):
        return f"did you mean {' or '.join(name for name in names if name in close)}?"
    if len(names) <= MOST_NAMES:
        return f"valid are {', '.join(sorted(names))}"
    return f"the nearest of {len(names)} are {', '.join(alike(word, names, MOST_NAMES, 0.0))}"


def first(reasons: Mapping[str, object], sentence: str = "{}") -> str | None:
    """``sentence`` with the first reason that holds in the place of ``{}``; None where none does."""
    return next((sentence.replace("{}", reason) for reason, holds in reasons.items() if holds), None)


def refuse(reasons: Mapping[str, object], error: type[KitError] = SpecError) -> None:
    """Raises ``error`` with the first reason that holds."""
    if (reason := first(reasons)) is not None:
        raise error(reason)


def dotted(location: Location) -> str:
    """A place in a document as people write it: ``job.seq_length``."""
    return ".".join(shown(part, str) for part in location)

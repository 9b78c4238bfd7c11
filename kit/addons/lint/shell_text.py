"""A shell script as text: its lines with their continuations, and the variables that it sets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

_ASSIGNED = re.compile(
    r"^([ \t]*)(?:(?:export|local|readonly|declare(?: -\w+)?)[ \t]+)?(\w+)=(\([^()]*\)|\"[^\"]*\"|'[^']*'|[^\s;&|]*)",
    re.M,
)
"""(indentation, name, value) of an assignment that begins a line; an array has its parentheses."""
_SET_TOO = re.compile(r"\b(?:read|for|getopts|mapfile|printf -v)\b[^\n;]*|\$\{\w+:?=")
_USED = re.compile(r"\$(?:\{(\w+)(\[[@*]\])?\}|(\w+))")
_LONGEST = 1 << 14
"""Most characters that variables put into a line; a script may nest them."""


def lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, text) of every line, joined with its continuation lines. As in a shell, a backslash
    before a blank continues nothing."""
    held, first = "", 0
    for index, raw in enumerate(text.splitlines(), start=1):
        first = first or index
        if raw.endswith("\\") and not raw.lstrip().startswith("#"):  # a comment ends with its line
            held += raw[:-1] + " "
            continue
        yield first, held + raw
        held, first = "", 0
    if held:
        yield first, held


def values(text: str) -> Mapping[str, str]:
    """Variables that are set once, at the left margin, to a text without a command in it: name → the text, arrays as
    words. Those that are set twice, or only under a condition, are left out."""
    found = [match.groups() for match in _ASSIGNED.finditer(text)]
    times = Counter(name for _, name, _ in found)
    known: dict[str, str] = {}
    for indentation, name, value in found:
        if times[name] == 1 and not indentation:
            plain = value[1:-1] if value[:1] in "('\"" and value else value
            plain = " ".join(
                line for line in plain.replace("\\\n", " ").split("\n") if not line.lstrip().startswith("#")
            )
            whole = plain if value.startswith("'") else expanded(plain, known)
            if len(whole) < _LONGEST and not re.search(r"\$|`", whole):
                known[name] = whole
    return known


def names_set(text: str) -> set[str]:
    """Every variable that the script may set."""
    others = " ".join(_SET_TOO.findall(text))
    return {match[2] for match in _ASSIGNED.finditer(text)} | set(re.findall(r"\w+", others))


def expanded(line: str, known: Mapping[str, str]) -> str:
    """The line with the variables whose value is known; the elements of an array are words, in quotes too."""
    line = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", line)
    grows = sum(len(known.get(match[1] or match[3], "")) for match in _USED.finditer(line))
    return _USED.sub(lambda match: known.get(match[1] or match[3], match[0]), line) if grows < _LONGEST else line

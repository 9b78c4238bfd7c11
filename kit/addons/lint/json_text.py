"""Reads JSON with the line of every key, accepts what DeepSpeed's parser accepts, and notes every irregularity.

``deepspeed.initialize`` reads its file with hjson, which accepts comments and trailing commas. accelerate and the
Hugging Face Trainer read the same file with ``json``, which refuses them (accelerate/utils/deepspeed.py,
HfDeepSpeedConfig).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from kit.errors import SpecError
from kit.specs.strict_yaml import Document
from kit.specs.text import Location

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|(//[^\n]*|#[^\n]*|/\*.*?\*/)", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|(,)(?=\s*[\]}}])")
_MARK = re.compile(rf"({_STRING})(\s*:)?|[{{}}\[\]]")


@dataclass(frozen=True)
class Irregularity:
    """Something that ``json`` refuses, or accepts silently."""

    kind: str
    """comment, trailing comma or duplicate key."""
    line: int
    detail: str = ""


def parse_json(text: str, name: str) -> tuple[Document, tuple[Irregularity, ...]]:
    """JSON text whose top level is an object, and its irregularities. Raises ``SpecError`` with the line."""
    plain = text.replace("\ufeff", " ")
    ends = [match.start() for match in re.finditer("\n", plain)]

    def line_at(position: int) -> int:
        return bisect_left(ends, position) + 1

    forgiven: list[Irregularity] = []
    for kind, pattern in (("comment", _COMMENT), ("trailing comma", _TRAILING_COMMA)):
        forgiven += [Irregularity(kind, line_at(match.start())) for match in pattern.finditer(plain) if match[1]]
        plain = pattern.sub(_blanked, plain)
    try:
        data = json.loads(plain)
    except json.JSONDecodeError as error:
        here = plain[error.pos : error.pos + 12].split("\n")[0]
        raise SpecError(f"{name}:{error.lineno}: not valid JSON: {error.msg.removesuffix(' at')} at {here!r}") from None
    except ValueError as error:  # a whole number of 4,300 digits
        raise SpecError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{name}: holds a {type(data).__name__} where an object is expected")
    lines, twice = _lines(plain, line_at)
    return Document(name=name, data=data, lines=lines), (*forgiven, *twice)


def _blanked(match: re.Match[str]) -> str:
    """Spaces in the place of an irregularity, so that positions stay the same; a text in quotes as it is."""
    return match[0] if match[1] is None else re.sub(r"[^\n]", " ", match[0])


def _lines(text: str, line_at: Callable[[int], int]) -> tuple[dict[Location, int], list[Irregularity]]:
    """The line of every key outside lists, and the duplicate keys."""
    lines: dict[Location, int] = {}
    twice: list[Irregularity] = []
    path: list[str] = []
    seen: list[set[str]] = []
    for mark in _MARK.finditer(text):
        if mark[0] in ("{", "["):
            path.append(mark[0])
            seen.append(set())
        elif mark[0] in ("}", "]"):
            path.pop()
            seen.pop()
        elif mark[2]:
            path[-1] = json.loads(mark[1])
            lines[tuple(path)] = line_at(mark.start())
            if path[-1] in seen[-1]:
                twice.append(Irregularity("duplicate key", lines[tuple(path)], path[-1]))
            seen[-1].add(path[-1])
    return lines, twice

"""JSON with the line of every key, read as forgivingly as DeepSpeed reads it, every forgiven thing noted.

``deepspeed.initialize`` reads a file by hjson, which takes comments and trailing commas; accelerate and the Hugging
Face Trainer read the same file by ``json`` and stop at them (accelerate/utils/deepspeed.py, HfDeepSpeedConfig).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from kit.errors import SpecError
from kit.specs.strict_yaml import Document
from kit.specs.text import Location

_SPACE = re.compile(r"[ \t\r\n\ufeff]+")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SCALAR = re.compile(r"[^\s,\]}:#/]+")


@dataclass(frozen=True)
class Irregularity:
    """Something that ``json`` refuses, or takes without a word."""

    kind: str
    """comment, trailing comma or duplicate key."""
    line: int
    detail: str = ""


@dataclass(frozen=True)
class JsonText:
    """A parsed file and what was forgiven."""

    document: Document
    irregularities: tuple[Irregularity, ...]


def parse_json(text: str, name: str) -> JsonText:
    """JSON text whose top level is an object. Raises ``SpecError`` with the line."""
    reader = _Reader(text, name)
    value = reader.value(())
    reader.skip()
    if reader.position < len(text):
        raise reader.error("something follows the end of the object")
    if not isinstance(value, dict):
        raise SpecError(f"{name}: holds a {type(value).__name__} where an object is expected")
    return JsonText(Document(name=name, data=value, lines=reader.lines), tuple(reader.irregularities))


@dataclass
class _Reader:
    text: str
    name: str
    position: int = 0
    lines: dict[Location, int] = field(default_factory=dict)
    irregularities: list[Irregularity] = field(default_factory=list)

    counted: tuple[int, int] = (0, 1)
    """A position and its line: lines are counted onwards from there."""

    @property
    def line(self) -> int:
        position, line = self.counted
        line += self.text.count("\n", position, self.position)
        self.counted = self.position, line
        return line

    def error(self, problem: str) -> SpecError:
        return SpecError(f"{self.name}:{self.line}: not valid JSON: {problem}")

    def skip(self) -> None:
        """White space and comments."""
        while True:
            if space := _SPACE.match(self.text, self.position):
                self.position = space.end()
            elif comment := _COMMENT.match(self.text, self.position):
                self.irregularities.append(Irregularity("comment", self.line))
                self.position = comment.end()
            else:
                return

    def value(self, location: Location) -> Any:
        self.skip()
        self.lines.setdefault(location, self.line)
        start = self.text[self.position : self.position + 1]
        if start == "{":
            return self._object(location)
        if start == "[":
            return self._array(location)
        if start == '"':
            return self._string()
        return self._scalar()

    def _object(self, location: Location) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while self._next_item("}", bool(members)):
            line = self.line
            if self.text[self.position] != '"':
                raise self.error(f"a key in double quotes is expected before {self._glimpse()}")
            key = self._string()
            self.skip()
            if not self.text.startswith(":", self.position):
                raise self.error(f"a colon is expected after {key!r}")
            self.position += 1
            inner = (*location, key)
            if key in members:
                self.irregularities.append(Irregularity("duplicate key", line, key))
            self.lines[inner] = line
            members[key] = self.value(inner)
        return members

    def _array(self, location: Location) -> list[Any]:
        items: list[Any] = []
        while self._next_item("]", bool(items)):
            items.append(self.value((*location, len(items))))
        return items

    def _next_item(self, end: str, after_another: bool) -> bool:
        """Step over the opening bracket or a comma; False at the closing bracket, which is consumed."""
        if not after_another:
            self.position += 1
            self.skip()
        else:
            self.skip()
            if self.text.startswith(",", self.position):
                comma = self.line
                self.position += 1
                self.skip()
                if self.text.startswith(end, self.position):
                    self.irregularities.append(Irregularity("trailing comma", comma))
            elif not self.text.startswith(end, self.position):
                raise self.error(f"a comma or {end} is expected before {self._glimpse()}")
        if self.position >= len(self.text):
            raise self.error(f"the file ends before its closing {end}")
        if self.text[self.position] == end:
            self.position += 1
            return False
        return True

    def _string(self) -> str:
        match = _STRING.match(self.text, self.position)
        if match is None:
            raise self.error("a string is not closed on its line")
        self.position = match.end()
        try:
            return str(json.loads(match.group()))
        except json.JSONDecodeError as error:
            raise self.error(error.msg) from None

    def _scalar(self) -> Any:
        match = _SCALAR.match(self.text, self.position)
        word = match.group() if match else ""
        try:
            value = json.loads(word)
        except ValueError:  # a whole number of 4,300 digits too
            raise self.error(f"{self._glimpse()} is not a value; text needs double quotes") from None
        self.position += len(word)
        return value

    def _glimpse(self) -> str:
        return repr(self.text[self.position : self.position + 12].split("\n")[0])

"""The words of a shell script's commands: each with its place, and with the variables that the script sets.

Understood are quotes, continuation lines, ``$X``, ``${X:-default}``, arrays, arithmetic and ``$(expr …)``. What a
variable of the caller or another program decides is None.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace


def _unnamed(pattern: str) -> str:
    """An expression that matches the same, without names of its parts."""
    return re.sub(r"\?P<\w+>", "?:", pattern)


_PARENTHESES = functools.reduce(lambda inner, _: rf"\((?:[^()]|{inner})*+\)?", range(16), r"\([^()]*+\)?")
"""From one to the one that closes it; others in it nest so deep."""
_EXPANDS = (
    rf"(?P<expands>`[^`]*`?|\$(?:(?P<command>{_PARENTHESES})|(?P<name>\w+)|"
    r"\{(?P<braced>\w+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>[^{}]*))?\}|[@*#?!$-])?)"
)
"""What ``$`` or a backtick begins."""
_IN_QUOTES = rf"\\(?:\n|(?P<escaped>.?))|{_EXPANDS}|(?P<plain>[^\"\\$`]+)"
"""A part of a text between double quotes."""
_BARE = (
    rf"\\(?!\n)(?P<escaped>.?)|'(?P<quoted>[^']*)'?|\"(?P<inner>(?:{_unnamed(_IN_QUOTES)})*+)\"?|{_EXPANDS}|"
    r"(?P<plain>[^ \t\r\n;&|()<>'\"\\$`]+)"
)
"""A part of a word. A backslash at the end of a line ends the word."""
_WORD = rf"(?:{_unnamed(_BARE)})"
_BLANK = r"(?:[ \t\r]|\\\n|#[^\n]*)"
_TOKEN = re.compile(
    rf"{_BLANK}+|\d*[<>]+(?:&[\d-]+|&?{_BLANK}*{_WORD}*)|(?P<ends>&&|\|\||[\n;&|()]|\Z)|(?P<word>{_WORD}+)", re.S
)
"""Blanks, a redirection with its file, the end of a command, or a word."""
_PARTS, _QUOTED_PARTS = re.compile(_BARE, re.S), re.compile(_IN_QUOTES, re.S)
_ASSIGNS = re.compile(r"(\w+)(\+?)=")
_HEREDOC = re.compile(
    r"(?:\bread\b[^\n;|]*?(?P<name>\w+)[ \t]*)?<<-?\s*(['\"]?)(?P<end>\w+)\2[^\n]*\n(?P<body>.*?)^\s*(?P=end)[ \t]*$",
    re.M | re.S,
)
"""A script or a text between ``<<EOF`` and ``EOF``; ``read NAME`` before it makes a variable of it."""
_OPENS, _CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_PREFIXES = {"then", "else", "elif", "do", "export", "local", "declare", "readonly", "{", "!", "set"} | _OPENS - {"for"}
_MOST_CHARACTERS = 1 << 18
_MOST_WRITTEN = 20


@dataclass(frozen=True)
class Word:
    """A word of a command; None where its value is not known."""

    value: str | None
    start: int
    end: int
    own: bool = True
    """Whether the text between ``start`` and ``end`` is this word, and not a variable that holds several."""

    def split(self) -> list[Word]:
        """The words of a variable that stands without quotes: none of an empty one, several of one with blanks."""
        several = [self.value] if self.value is None else self.value.split()
        return [self] if several == [self.value] else [replace(self, value=each, own=False) for each in several]


@dataclass(frozen=True)
class Line:
    """A command with the variables that hold where it starts."""

    words: tuple[Word, ...]
    variables: Mapping[str, str | None]


@dataclass
class _Reader:
    text: str
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    put_in: int = 0
    """Characters and words that variables put in so far."""

    def lines(self) -> Iterator[Line]:
        depth, conditional = 0, False  # conditions and loops around a command; && or || before it
        words: list[Word] = []
        own: dict[str, str | None] = {}  # the variables of this command
        tokens = _TOKEN.finditer(self.text)
        for token in tokens:
            if token["word"] and not words and (assigned := _ASSIGNS.match(token["word"])):
                value = token.start() + assigned.end()
                if self.text.startswith("(", value):
                    inside = itertools.takewhile(lambda each: each["ends"] != ")", tokens)
                    elements = [word for each in inside if each["word"] for word in self._words(*each.span())]
                    self._assign_array(assigned, elements, depth > 0 or conditional)
                else:
                    own[assigned[1]] = self._assigned(assigned, value, token.end(), depth > 0 or conditional)
            elif token["word"]:
                words += self._words(*token.span())
                first = words[0].value if len(words) == 1 else None
                depth += (first in _OPENS) - (first in _CLOSES and depth > 0)
                words = [] if first in _PREFIXES else words
            elif token["ends"] is not None:
                if len(words) > 1 and words[0].value == "for":
                    own[words[1].value or ""] = None
                    words = []
                if words:
                    yield Line(tuple(words), {**self.variables, **own})
                else:
                    self.variables |= own
                words, own, conditional = [], {}, token["ends"] in ("&&", "||")

    def _assigned(self, assigned: re.Match[str], start: int, end: int, conditional: bool) -> str | None:
        """The value of a variable; None also where a condition decides which of two it is."""
        words = self._words(start, end)
        held = self.variables.get(assigned[1], "") if assigned[2] else ""
        is_known = held is not None and all(word.value for word in words)
        value = f"{held}{' '.join(word.value or '' for word in words)}" if is_known else None
        known = self.variables.get(assigned[1], value)
        return value if not conditional or known in (value, "", None) else None

    def _assign_array(self, assigned: re.Match[str], words: list[Word], conditional: bool) -> None:
        array = self.arrays.get(assigned[1], []) if assigned[2] else []
        is_alternative = conditional and words and words[0].value in {word.value for word in array}
        self.arrays[assigned[1]] = array if is_alternative else [*array, *words]

    def _words(self, start: int, end: int) -> list[Word]:
        """One word as it is written: none or several where it is an array, or a variable with blanks."""
        found = list(self._parts(_PARTS, start, end))
        kinds = {kind for kind, _ in found}
        arrays = [(kind, part) for kind, part in found if isinstance(part, list)]
        if arrays and "plain" not in kinds:
            kind, array = arrays[-1]
            return array if kind == "quoted" else [each for word in array for each in word.split()]
        parts = [part for _, part in found if not isinstance(part, list)]
        value = None if None in parts else "".join(part or "" for part in parts)
        word = Word(value, start, end)
        return [word] if {"plain", "quoted"} & kinds else word.split()

    def _parts(self, pattern: re.Pattern[str], start: int, end: int) -> Iterator[tuple[str, str | list[Word] | None]]:
        """(kind, value) of each part of a word: an array is the list of its words."""
        for found in pattern.finditer(self.text, start, end):
            kind = found.lastgroup or "plain"
            if kind == "expands":
                yield kind, self._expansion(found)
            elif kind == "inner":
                yield "quoted", ""
                yield from (("quoted", part) for _, part in self._parts(_QUOTED_PARTS, *found.span("inner")))
            else:
                yield kind, found[kind] or ""

    def _expansion(self, found: re.Match[str]) -> str | list[Word] | None:
        """What ``$`` or a backtick makes. An array of words, where it is one."""
        if found["command"]:
            return self._computed(found["command"][1:].removesuffix(")").removeprefix("(").removesuffix(")").strip())
        if (name := found["name"] or found["braced"]) is None:
            return found[0] if found[0] in ("$", "$@", "$*") else None
        array, value = self.arrays.get(name) if found["all"] else None, self.variables.get(name)
        self.put_in += len(array or value or "")
        if self.put_in > _MOST_CHARACTERS:  # a script may nest them
            array = value = None
        if array is not None:
            return array
        if value or found["default"] is None:
            return value
        default = _Reader(found["default"].strip("\"'"), self.variables)
        parts = [part for _, part in default._parts(_QUOTED_PARTS, 0, len(default.text))]
        return None if None in parts else "".join(map(str, parts))

    def _computed(self, inner: str) -> str | None:
        """Whole numbers of ``$((…))`` and ``$(expr …)``."""
        known = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self.variables.get(m[1]) or "?", inner.removeprefix("expr ")
        )
        known = known.replace("\\", "")
        if not re.fullmatch(r"[\d\s+*/()%-]{1,200}", known) or "**" in known:
            return None
        with contextlib.suppress(SyntaxError, ArithmeticError, ValueError, TypeError):
            return str(int(eval(known.replace("/", "//"), {"__builtins__": {}})))
        return None


def shell_lines(text: str, written: bool = False) -> list[Line]:
    """Every command of a script, in order; ``written``: then those of the scripts that it writes or hands over by
    ``<<EOF`` too."""
    text = text[:_MOST_CHARACTERS]
    texts = list(itertools.islice(_HEREDOC.finditer(text), _MOST_WRITTEN))
    read = {each["name"]: each["body"].replace("\\\n", " ") for each in texts if each["name"]}
    variables = {name: None if "$" in body else body for name, body in read.items()}
    reader = _Reader(_HEREDOC.sub(lambda each: _blank(each[0]), text), variables)
    found = list(reader.lines())
    for each in texts if written else ():
        handed = _Reader(_blank(text[: each.start("body")]) + each["body"], dict(reader.variables))
        found += handed.lines()
    return found


def _blank(text: str) -> str:
    """As many lines, and nothing in them."""
    return re.sub(r"[^\n]", " ", text)

"""The words of a shell script's commands: each with its place, and with the variables that the script sets.

Understood are quotes, continuation lines, ``$X``, ``${X:-default}``, arrays, arithmetic and ``$(expr …)``. What a
variable of the caller or another program decides is None.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_BLANKS = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*")
_REDIRECTED = re.compile(r"\d*[<>]+(?:(&[\d-]+)|&)?")
_ASSIGNS = re.compile(r"(\w+)(\+?)=")
_BARE = re.compile(
    r"\\(?!\n)(?P<escaped>.?)|'(?P<quoted>[^']*)'?|(?P<opens>\")|(?P<expands>[$`])|"
    r"(?P<plain>[^ \t\r\n;&|()<>'\"\\$`]+)",
    re.S,
)
"""A part of a word. A backslash at the end of a line ends the word."""
_IN_QUOTES = re.compile(r"\\(?:\n|(?P<escaped>.?))|(?P<expands>[$`])|(?P<plain>[^\"\\$`]+)", re.S)
"""A part of a text between double quotes."""
_EXPANSION = re.compile(
    r"(?P<command>\$\()|`[^`]*`?|"
    r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>[^{}]*))?\}|[@*#?!$-])?"
)
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
class _Scanner:
    text: str
    at: int = 0
    depth: int = 0
    """Conditions and loops around the command."""
    put_in: int = 0
    """Characters and words that variables put in so far."""
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)

    def lines(self) -> Iterator[Line]:
        conditional = False
        while self.at < len(self.text):
            line = self._line(conditional)
            if line.words:
                yield line
            conditional = self.text.startswith(("&&", "||"), self.at)
            self.at += 2 if conditional else 1

    def _line(self, conditional: bool) -> Line:
        """The words up to a newline or an operator, which is left."""
        words: list[Word] = []
        own: dict[str, str | None] = {}
        while self._skip_blanks():
            if not words and (assigned := self._passed(_ASSIGNS)):
                self._assignment(assigned, own, self.depth > 0 or conditional)
                continue
            words += self._word()
            first = words[0].value if len(words) == 1 else None
            self.depth += (first in _OPENS) - (first in _CLOSES and self.depth > 0)
            words = [] if first in _PREFIXES else words
        if len(words) > 1 and words[0].value == "for":
            self.variables[words[1].value or ""] = None
            words = []
        if not words:
            self.variables |= own
        return Line(tuple(words), {**self.variables, **own})

    def _passed(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What stands here; the scanner goes behind it."""
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    def _skip_blanks(self) -> bool:
        """To the next word of this command, behind redirections; False at its end."""
        self._passed(_BLANKS)
        while redirected := self._passed(_REDIRECTED):
            if redirected[1] is None and self._skip_blanks():
                self._word()
            self._passed(_BLANKS)
        return self.text[self.at : self.at + 1] not in ("", *"\n;&|()")

    def _assignment(self, assigned: re.Match[str], own: dict[str, str | None], conditional: bool) -> None:
        """``own``: the variables of this command, which a value is added to. An array is the script's."""
        name = assigned[1]
        if self.text.startswith("(", self.at):
            self.at += 1
            words = self._elements()
            array = self.arrays.get(name, []) if assigned[2] else []
            is_alternative = conditional and words and words[0].value in {word.value for word in array}
            self.arrays[name] = array if is_alternative else [*array, *words]
            return
        words = self._word()
        held = self.variables.get(name, "") if assigned[2] else ""
        is_known = held is not None and all(word.value for word in words)
        value = f"{held}{' '.join(word.value or '' for word in words)}" if is_known else None
        known = self.variables.get(name, value)
        own[name] = value if not conditional or known in (value, "", None) else None

    def _elements(self) -> list[Word]:
        """The words of an array, up to the parenthesis that closes it."""
        words: list[Word] = []
        while self.text[self.at : self.at + 1] not in (")", ""):
            if self._skip_blanks():
                words += self._word()
            else:
                self.at += not self.text.startswith(")", self.at)
        self.at += 1
        return words

    def _word(self) -> list[Word]:
        """One word as it is written: none or several where it is an array, or a variable with blanks."""
        start = self.at
        found = list(self._parts(_BARE))
        kinds = {kind for kind, _ in found}
        arrays = [(kind, part) for kind, part in found if isinstance(part, list)]
        if arrays and "plain" not in kinds:
            kind, array = arrays[-1]
            return array if kind == "quoted" else [each for word in array for each in word.split()]
        parts = [part for _, part in found if not isinstance(part, list)]
        value = None if None in parts else "".join(part or "" for part in parts)
        word = Word(value, start, self.at)
        return [word] if {"plain", "quoted"} & kinds else word.split()

    def _parts(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, str | list[Word] | None]]:
        """(kind, value) of each part of a word: an array is the list of its words."""
        while found := pattern.match(self.text, self.at):
            kind = found.lastgroup or "plain"
            if kind == "expands":
                yield kind, self._expansion()
                continue
            self.at = found.end()
            if kind == "opens":
                yield "quoted", ""
                yield from (("quoted", part) for _, part in self._parts(_IN_QUOTES))
                self.at += 1
            else:
                yield kind, found[kind] or ""

    def _expansion(self) -> str | list[Word] | None:
        """What ``$`` or a backtick makes. An array of words, where it is one."""
        begin, found = self.at, self._passed(_EXPANSION)
        assert found is not None, "begins with a dollar sign or a backtick"
        if found["command"]:
            self.at = self._closing()
            inner = self.text[begin + 2 : self.at - 1]
            return self._computed(inner.removeprefix("(").removesuffix(")").strip())
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
        words = _Scanner(found["default"].strip("\"'"), variables=self.variables)._word()
        return words[0].value if words else ""

    def _closing(self) -> int:
        """The place behind the parenthesis that closes the one before this place."""
        signs, same = itertools.tee(re.compile("[()]").finditer(self.text, self.at))
        depths = itertools.accumulate(1 if sign[0] == "(" else -1 for sign in same)
        return next((sign.end() for sign, depth in zip(signs, depths, strict=True) if depth < 0), len(self.text) + 1)

    def _computed(self, inner: str) -> str | None:
        """Whole numbers of ``$((…))`` and ``$(expr …)``."""
        known = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self.variables.get(m[1]) or "?", inner.removeprefix("expr ")
        )
        known = known.replace("\\", "")
        if not re.fullmatch(r"[\d\s+*/()%-]{1,200}", known) or "**" in known:
            return None
        try:
            return str(int(eval(known.replace("/", "//"), {"__builtins__": {}})))
        except (SyntaxError, ArithmeticError, ValueError, TypeError):
            return None


def shell_lines(text: str, written: bool = False) -> list[Line]:
    """Every command of a script, in order; ``written``: then those of the scripts that it writes or hands over by
    ``<<EOF`` too."""
    text = text[:_MOST_CHARACTERS]
    texts = list(itertools.islice(_HEREDOC.finditer(text), _MOST_WRITTEN))
    read = {each["name"]: each["body"].replace("\\\n", " ") for each in texts if each["name"]}
    variables = {name: None if "$" in body else body for name, body in read.items()}
    scanner = _Scanner(_HEREDOC.sub(lambda each: _blank(each[0]), text), variables=variables)
    found = list(scanner.lines())
    for each in texts if written else ():
        handed = _Scanner(_blank(text[: each.start("body")]) + each["body"], variables=dict(scanner.variables))
        found += handed.lines()
    return found


def _blank(text: str) -> str:
    """As many lines, and nothing in them."""
    return re.sub(r"[^\n]", " ", text)

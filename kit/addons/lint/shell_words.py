"""The words of a shell script's commands: each with its place, and with the variables that the script sets.

Understood are quotes, continuation lines, ``$X``, ``${X:-default}``, arrays, arithmetic and ``$(expr …)``. What a
variable of the caller or another program decides is None.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_ASSIGNS = re.compile(r"(\w+)\+?=")
_PLAIN = re.compile(r"[^\s;&|()<>'\"\\$`]+")
_REDIRECTED = re.compile(r"[<>]+(?:(&[\d-]+)|&)?")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(\[[@*]\])?(?::?[-=]([^{}]*))?\}|[@*#?!$-])")
_HEREDOC = re.compile(
    r"(?:\bread\b[^\n;|]*?(?P<name>\w+)[ \t]*)?<<-?\s*(['\"]?)(?P<end>\w+)\2[^\n]*\n(?P<body>.*?)^\s*(?P=end)[ \t]*$",
    re.M | re.S,
)
"""A script or a text between ``<<EOF`` and ``EOF``; ``read NAME`` before it makes a variable of it."""
_OPENS, _CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_PREFIXES = {"then", "else", "elif", "do", "export", "local", "declare", "readonly", "{", "!", "set"} | _OPENS
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
    put_in: int = 0
    """Characters and words that variables put in so far."""
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)

    def lines(self) -> list[Line]:
        found: list[Line] = []
        conditional = False
        while self.at < len(self.text):
            line = self._line(conditional)
            found += [line] if line.words else []
            operator = self.text[self.at : self.at + 2]
            conditional = operator in ("&&", "||")
            self.at += 2 if conditional else 1
        return found

    def _line(self, conditional: bool) -> Line:
        """The words up to a newline or an operator, which is left."""
        words: list[Word] = []
        own: dict[str, str | None] = {}
        while self._skip_blanks():
            if not words and (assigned := _ASSIGNS.match(self.text, self.at)):
                self._assignment(assigned[1], assigned.end(), own, self.depth > 0 or conditional)
                continue
            words += self._word()
            if self.text[self.at : self.at + 1] in ("<", ">") and words and (words[-1].value or "").isdigit():
                words.pop()  # of a redirection
            first = words[0].value if len(words) == 1 else None
            self.depth += (first in _OPENS) - (first in _CLOSES and self.depth > 0)
            if first in _PREFIXES and first != "for":
                words = []
        if words and words[0].value == "for" and len(words) > 1:
            self.variables[words[1].value or ""] = None
            words = []
        if not words:
            self.variables |= own
        return Line(tuple(words), {**self.variables, **own})

    def _skip_blanks(self) -> bool:
        """To the next word of this command; False at its end."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t\r":
                self.at += 1
            elif char == "#":
                self.at = self._find("\n")
                return False
            elif char in "<>":
                found: re.Match[str] = _REDIRECTED.match(self.text, self.at)  # type: ignore[assignment]
                self.at = found.end()
                if found[1] is None and self._skip_blanks():
                    self._word()
            else:
                return char not in "\n;&|()"
        return False

    def _find(self, what: str) -> int:
        found = self.text.find(what, self.at)
        return len(self.text) if found < 0 else found

    def _assignment(self, name: str, begin: int, own: dict[str, str | None], conditional: bool) -> None:
        self.at = begin
        if self.text.startswith("(", begin):
            self.at += 1
            words: list[Word] = []
            while self.at < len(self.text) and self.text[self.at] != ")":
                if self._skip_blanks():
                    words += self._word()
                elif self.at < len(self.text) and self.text[self.at] != ")":
                    self.at += 1
            self.at += 1
            held = self.arrays.get(name, []) if self.text[begin - 2] == "+" else []
            is_alternative = conditional and words and words[0].value in {word.value for word in held}
            self.arrays[name] = held if is_alternative else [*held, *words]
            return
        at_end = self.at >= len(self.text) or self.text[self.at] in " \t\r\n;&|"
        values = [] if at_end else self._word()
        value = "" if at_end else " ".join(v.value for v in values if v.value) if all(v.value for v in values) else None
        known = self.variables.get(name, value)
        own[name] = value if not conditional or known in (value, "", None) else None

    def _word(self) -> list[Word]:
        """One word as it is written: none or several where it is an array, or a variable with blanks."""
        start, parts, quoted, plain = self.at, list[str | None](), False, False
        array: list[Word] | None = None
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|()<>":
            char = self.text[self.at]
            if char == "\\":
                if self.text.startswith("\\\n", self.at):
                    break
                parts.append(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif char in "'\"":
                quoted = True
                found = self._quoted(char, parts)
                array = array if found is None else found
            elif char in "$`":
                found = self._expansion(parts)
                array = array if found is None else list(_split(found))
            else:
                match = _PLAIN.match(self.text, self.at)
                parts.append(match[0] if match else char)
                plain = True
                self.at += len(match[0]) if match else 1
        if array is not None and not plain:
            return array
        value = None if None in parts else "".join(part or "" for part in parts)
        if value is not None and not quoted and not plain and (several := value.split()) != [value]:
            return [Word(each, start, self.at, own=False) for each in several]
        return [Word(value, start, self.at)]

    def _quoted(self, quote: str, parts: list[str | None]) -> list[Word] | None:
        self.at += 1
        array = None
        while self.at < len(self.text) and self.text[self.at] != quote:
            char = self.text[self.at]
            if quote == '"' and char == "\\":
                parts.append("" if self.text.startswith("\\\n", self.at) else self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif quote == '"' and char in "$`":
                found = self._expansion(parts)
                array = array if found is None else found
            else:
                parts.append(char)
                self.at += 1
        self.at += 1
        return array

    def _expansion(self, parts: list[str | None]) -> list[Word] | None:
        """What ``$`` or a backtick begins. An array of words, where it is one."""
        if self.text.startswith("$(", self.at):
            end = self._closing()
            inner = self.text[self.at + 2 : end].removeprefix("(").removesuffix(")").strip()
            parts.append(self._computed(inner))
            self.at = end + 1
            return None
        if self.text[self.at] == "`":
            self.at += 1
            self.at = self._find("`") + 1
            parts.append(None)
            return None
        match = _VARIABLE.match(self.text, self.at)
        if match is None:
            parts.append("$")
            self.at += 1
            return None
        self.at = match.end()
        name = match[1] or match[2]
        if name is None:
            parts.append(match[0] if match[0] in ("$@", "$*") else None)
            return None
        array, value = self.arrays.get(name) if match[3] else None, self.variables.get(name)
        self.put_in += len(array or value or "")
        if self.put_in > _MOST_CHARACTERS:  # a script may nest them
            array = value = None
        if array is not None:
            return array
        if not value and match[4] is not None:
            words = _Scanner(match[4].strip("\"'") + " ", variables=self.variables)._word() if match[4] else []
            value = words[0].value if words else ""
        parts.append(value)
        return None

    def _closing(self) -> int:
        depth = 0
        for place in range(self.at + 1, len(self.text)):
            depth += (self.text[place] == "(") - (self.text[place] == ")")
            if depth == 0:
                return place
        return len(self.text)

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
    scanner = _Scanner(
        _HEREDOC.sub(_blank, text), variables={name: None if "$" in body else body for name, body in read.items()}
    )
    found = scanner.lines()
    for each in texts if written else ():
        before = re.sub(r"[^\n]", " ", text[: each.start("body")])
        found += _Scanner(before + each["body"], variables=dict(scanner.variables)).lines()
    return found


def _split(array: list[Word]) -> Iterator[Word]:
    """The words of an array that stands without quotes: an element with blanks is several."""
    for word in array:
        several = (word.value or "").split()
        yield from (replace(word, value=each, own=False) for each in several) if len(several) > 1 else (word,)


def _blank(found: re.Match[str]) -> str:
    """As many lines, and nothing in them."""
    return re.sub(r"[^\n]", " ", found[0])

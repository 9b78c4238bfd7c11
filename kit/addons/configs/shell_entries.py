"""A script: the flags of the command that trains, of its launcher, and the variables that it starts with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kit.addons.configs.entries import UNRESOLVED, Entry, Source
from kit.addons.configs.tables import tables
from kit.addons.lint.commands import plain_name
from kit.addons.lint.shell_words import Line, Word, shell_lines
from kit.errors import SpecError

LAUNCHER, ENVIRONMENT = "launcher.", "env."
"""Prefixes of the keys that are not the program's own."""


def read_shell(text: str, name: str) -> Source:
    """The first command that a program's words begin, such as ``swift sft``. Raises ``SpecError`` if there is none."""
    known = [tuple(start.split()) for table in tables() for start in table.commands]
    for line in shell_lines(text):
        if line.words and line.words[0].value in ("[", "[[", "test", "echo", "printf"):
            continue  # it names a program, and does not start it
        for start in known:
            if (at := _place(text, line.words, start)) >= 0:
                return _source(text, name, line, at, start)
    starts = ", ".join(table.commands[0] for table in tables() if table.commands)
    raise SpecError(f"{name}: no command that kit knows: {starts} …")


def _place(text: str, words: Sequence[Word], start: tuple[str, ...]) -> int:
    """The place of ``start`` in a command, whatever folder its program is in, a variable's too; −1 where it is not."""
    written = ["/" + (word.value or text[word.start : word.end].strip("'\"")) for word in words]
    places = range(len(words) - len(start) + 1)
    return next((at for at in places if all(map(str.endswith, written[at:], (f"/{name}" for name in start)))), -1)


def _source(text: str, name: str, line: Line, at: int, start: tuple[str, ...]) -> Source:
    before, words = line.words[:at], [word for word in line.words[at + len(start) :] if word.value not in ("$@", "$*")]
    entries = {
        **{f"{ENVIRONMENT}{key}": Entry(value, 0) for key, value in line.variables.items() if value is not None},
        **{f"{LAUNCHER}{key}": entry for key, entry in _flags(text, before)},
        **dict(_flags(text, words)),
    }
    last = next(word for word in reversed(line.words) if not (word.value or "").startswith(_TYRO))
    return Source(name, text, "shell", entries, " ".join(start), last.end)


_HYDRA = re.compile(r"[+~]*[A-Za-z_][\w.]*=")
_TYRO = "activation-checkpoint:"
"""torchtitan's flag for the class of a part, which follows a switch too."""


def _flags(text: str, words: Sequence[Word]) -> Iterator[tuple[str, Entry]]:
    """``--key value``, ``--key=value`` and hydra's ``key=value``; a word before all of them is ``argument``."""
    flags: list[int] = []
    for at, word in enumerate(words):
        of_flag = bool(flags) and flags[-1] == at - 1 and "=" not in (words[at - 1].value or "=")
        if (word.value or "").startswith(("--", _TYRO)) or not (of_flag or _HYDRA.match(word.value or "x=") is None):
            flags.append(at)
    yield from (("argument", _entry(text, [word])) for word in words[: flags[0] if flags else len(words)])
    for at, following in pairwise([*flags, len(words)]):
        flag = words[at]
        sign = ":" if (flag.value or "").startswith(_TYRO) else "="
        key, equals, value = (flag.value or "").lstrip("+").partition(sign)
        if equals:
            length = len(text[flag.start : flag.end].partition(sign)[2])
            yield plain_name(key), _entry(text, [Word(value, flag.end - length, flag.end, flag.own)])
        elif key:
            yield plain_name(key), _entry(text, words[at + 1 : following], flag)


def _entry(text: str, words: Sequence[Word], flag: Word | None = None) -> Entry:
    first = words[0] if words else flag
    assert first is not None, "a flag or a word"
    line = text.count("\n", 0, first.start) + 1
    values = [UNRESOLVED if word.value is None else word.value for word in words]
    if len(values) != 1:
        return Entry(values or True, line)
    return Entry(values[0], line, *((first.start, first.end) if first.own else (-1, -1)))

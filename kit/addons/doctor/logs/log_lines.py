"""Reads logs, one file for all ranks or one per rank, in pieces of bounded size, and finds the rank of each line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kit.errors import SpecError

_MARKED = re.compile(r"\s*(?:\[(?:default|rank)?(\d{1,7})\]|(?:rank|Rank) ?(\d{1,7})\b)[:\s]")
"""Prefixes with a rank: torch's ``[rank1]:``, torchrun's ``[default1]:`` (--tee), ``rank 1: ``."""
_IN_NAME = re.compile(r"rank[-_]?(\d{1,7})|(?:^|[/_.-])(\d{1,7})/std(?:out|err)\.log$")
"""File names with a rank: ``rank3.log``, ``logs/rank_3.txt``, and torchrun's ``attempt_0/3/stderr.log``."""
PIECE_BYTES = 1 << 20
AROUND_BYTES = 1 << 17
"""Bytes of context before and after a piece, enough for a long traceback."""
LINE_BYTES = 1 << 12
"""Bytes read of a line before and after a match, because some programs write one endless line."""


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    text: str
    """The line without its rank prefix."""
    rank: int | None
    file: str
    number: int

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Piece:
    """A part of a log, with context before and after it."""

    text: bytes
    begin: int
    end: int
    """The part without context is ``text[begin:end]``."""
    line: int
    """Number of the line at ``begin``."""
    file: str
    rank: int | None
    """Rank that wrote the whole file, if the file's name says so."""

    def span(self, position: int) -> tuple[int, int]:
        """(begin, end) of the line around a position, cut if the line is very long."""
        first, last = max(0, position - LINE_BYTES), position + LINE_BYTES
        start = max(self.text.rfind(b"\n", first, position), self.text.rfind(b"\r", first, position), first - 1)
        stops = [at for at in (self.text.find(sign, position, last) for sign in (b"\n", b"\r")) if at >= 0]
        return start + 1, min(stops, default=min(last, len(self.text)))

    def named(self, raw: bytes, number: int) -> Line:
        """A line with its rank."""
        text = raw.decode(errors="replace")
        mark = _MARKED.match(text)
        rank = int(mark.group(1) or mark.group(2)) if mark else self.rank
        return Line(text[mark.end() :] if mark else text, rank, self.file, number)

    def line_at(self, match: re.Match[bytes], number: int) -> Line:
        """The line in which a match begins; its text is what stands around the match, as it is."""
        start = self.text.rfind(b"\n", max(0, match.start() - LINE_BYTES), match.start()) + 1
        text = self.text[max(start, match.start() - 100) : match.end()].decode(errors="replace").strip()[:200]
        return replace(self.named(self.text[start : min(match.end(), start + LINE_BYTES)], number), text=text)

    def numbered(self, found: Iterable[re.Match[bytes]]) -> Iterator[tuple[re.Match[bytes], int]]:
        """What was found, in its order in the text, each with the number of its line."""
        number, counted = self.line, self.begin
        for match in found:
            number += self.text.count(b"\n", counted, match.start())
            counted = match.start()
            yield match, number

    def before(self, position: int, lines: int) -> list[Line]:
        """Up to ``lines`` lines before the line of a position, the nearest first; without line numbers."""
        start = self.text.rfind(b"\n", 0, position) + 1
        raw = self.text[max(0, start - min(AROUND_BYTES, lines * LINE_BYTES)) : start].splitlines()[-lines:]
        return [self.named(each[-LINE_BYTES:], 0) for each in reversed(raw)]

    def after(self, position: int) -> list[str]:
        """The lines from a position to the end of the piece's context, with their rank prefixes."""
        raw = self.text[position : position + AROUND_BYTES].decode(errors="replace").splitlines()
        return [line[:LINE_BYTES] for line in raw]


def log_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files among ``paths``, and all files below its directories."""
    for path in paths:
        if path.is_dir():
            yield from sorted(
                p for p in path.rglob("*") if p.suffix in (".log", ".txt", ".out", ".err") and p.is_file()
            )
        elif path.is_file():
            yield path
        else:
            raise SpecError(f"{path}: no such log; name the files that the launcher wrote")


def pieces(path: Path) -> Iterator[Piece]:
    """Splits a log into pieces at ends of lines, or inside an endless line. Memory does not grow with the file."""
    by_name = _IN_NAME.search(path.as_posix())
    rank = int(by_name.group(1) or by_name.group(2)) if by_name else None
    text, begin, line = b"", 0, 1
    try:
        stream = path.open("rb")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    with stream:
        for more in itertools.chain(iter(partial(stream.read, PIECE_BYTES), b""), [b""]):
            text += more
            ahead = max(begin, len(text) - AROUND_BYTES)
            end = (text.rfind(b"\n", begin, ahead) + 1 or ahead) if more else len(text)
            yield Piece(text, begin, end, line, path.name, rank)
            line += text.count(b"\n", begin, end)
            kept = max(0, end - AROUND_BYTES)
            text, begin = text[kept:], end - kept

"""Logs as they come: one file of all ranks, or one a rank → lines that know their rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.errors import SpecError

_MARKED = re.compile(r"^\s*(?:\[(?:default|rank)?(\d+)\]|\[rank(\d+)\]|(?:rank|Rank) ?(\d+)\b)[:\s]")
"""``[rank1]:`` of torch, ``[default1]:`` of torchrun's tee, ``rank 1: ``."""
_IN_NAME = re.compile(r"rank[-_]?(\d+)|(?:^|[/_.-])(\d+)/std(?:out|err)\.log$")
"""``rank3.log``, ``logs/rank_3.txt``, and torchrun's ``attempt_0/3/stderr.log``."""
LARGEST_LOG_BYTES = 1 << 30


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    text: str
    """The line without the prefix of its rank."""
    rank: int | None
    file: str
    number: int

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.number}"


def log_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files named, and those below directories named."""
    for path in paths:
        if path.is_dir():
            yield from sorted(
                p for p in path.rglob("*") if p.suffix in (".log", ".txt", ".out", ".err") and p.is_file()
            )
        elif path.is_file():
            yield path
        else:
            raise SpecError(f"{path}: no such log; name the files that the launcher wrote")


def read_lines(path: Path) -> Iterator[Line]:
    """Lines of a log; undecodable bytes become replacement signs. Raises ``SpecError`` for one that is too large."""
    if path.stat().st_size > LARGEST_LOG_BYTES:
        raise SpecError(f"{path.name} is larger than 1 GiB; give its last part (tail -c 100M)")
    by_name = _IN_NAME.search(path.as_posix())
    default = int(next(g for g in by_name.groups() if g is not None)) if by_name else None
    rank = default
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, raw in enumerate(stream, start=1):
            text = raw.rstrip("\r\n")
            mark = _MARKED.match(text)
            rank = int(next(g for g in mark.groups() if g is not None)) if mark else default
            yield Line(text[mark.end() :] if mark else text, rank, path.name, number)

"""Python's tracebacks in a log, one rank's among the lines of others, and torchrun's table of the ranks that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kit.addons.doctor.logs.log_lines import Piece

TRACEBACK, TABLE = b"Traceback (most recent call last)", b"Root Cause (first observed failure)"
LAUNCHER_ERRORS = ("ChildFailedError", "CalledProcessError", "SignalException")
"""Exceptions of a launcher; the root cause is in the log of a rank."""
_FRAME = re.compile(r'\s+File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)')
_RICH = re.compile(r"\s*[│|]\s+(?P<file>\S+\.py):(?P<line>\d+) in (?P<name>\S+)")
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_OTHER_RANK = re.compile(r"\s*\[(?:default|rank)?\d+\]")
_PREFIX = re.compile(
    r"(?P<rank>(?:\[(?:default|rank)\d+\]:? ?|\d+: |[\w.-]+: )*)(?P<margin>(?: *[|+] )?)(?:Exception Group )?$"
)
"""Text before ``Traceback`` on its line: the rank's prefix, and the margin of an exception group (PEP 654), whose first
heading begins with a plus sign."""
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib(?:64)?/python3[\d.]*/|^<|^(?:torch|deepspeed|accelerate)/")
_CHAINED = re.compile(r"During handling of the above exception|was the direct cause of the following exception")
_FIRST_OF_GROUP = re.compile(r"\+-\+-+ 1 -+$")
_IGNORED = re.compile(r"Exception ignored in|--- Logging error ---")


@dataclass(frozen=True)
class Traceback:
    """An exception that reached the top of a program."""

    type: str
    message: str
    own: str
    """The innermost frame of the user's code, ``file:line in function``; empty if all frames are in libraries."""
    raised: str
    """The innermost frame."""
    line: int
    """Number of lines from the heading to the exception."""
    chained: bool
    """Whether the exception was raised while the previous one was handled, or because of it; or is the first exception
    of the group before it."""

    @property
    def name(self) -> str:
        """The exception's name without its module."""
        return self.type.rsplit(".", 1)[-1]

    @property
    def frames(self) -> str:
        """The exception's origin as text."""
        return f"{self.own}, raised in {self.raised}" if self.own not in ("", self.raised) else self.raised


def read_traceback(piece: Piece, position: int, rank: int | None) -> Traceback | None:
    """The traceback whose heading is at a position; None if its end is missing, or if Python continued after it."""
    start = piece.text.rfind(b"\n", 0, position) + 1
    match = _PREFIX.search(piece.text[start:position].decode(errors="replace"))
    margin = match["margin"].replace("+", "|") if match else ""
    prefix = match["rank"] + margin if match else ""
    before = [line.text for line in piece.before(position, 8) if line.rank == rank][:3]
    if any(_IGNORED.search(text) for text in before):
        return None
    frames: list[re.Match[str]] = []
    for number, raw in enumerate(piece.after(position)):
        text = raw[len(prefix) :]
        if not raw.startswith(prefix.rstrip()) or (not prefix and _OTHER_RANK.match(raw)) or not number:
            continue
        if frame := _FRAME.match(text) or _RICH.match(text):
            frames.append(frame)
        elif text[:1] not in ("", " ", "\t", "│", "╭", "╰", "|") and (found := _EXCEPTION.match(text)):
            if not frames:
                return None
            own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
            return Traceback(
                type=found["type"],
                message=(found["message"] or "").strip()[:400],
                own=_place(own[-1:]),
                raised=_place(frames[-1:]),
                line=number,
                chained=any(_CHAINED.search(text) or (margin and _FIRST_OF_GROUP.search(text)) for text in before),
            )
    return None


def _place(frames: Sequence[re.Match[str]]) -> str:
    return "".join(f"{frame['file']}:{frame['line']} in {frame['name']}" for frame in frames)


@dataclass(frozen=True)
class Failed:
    """The first failed rank in torchrun's ``ChildFailedError`` table, or a failed process of another launcher."""

    rank: int | None
    how: str
    """Its exit code or signal, and its host."""
    time: str = ""
    """When it failed, by the table; each node's launcher prints one of its own."""


def read_table(piece: Piece, position: int) -> Failed | None:
    """The root cause in torchrun's table of failed ranks (torch/distributed/elastic/multiprocessing/errors)."""
    rows = dict(re.findall(r"(?m)(\w+) +: (.+)$", "\n".join(piece.after(position)[:8])))
    rank = re.match(r"\d+", rows.get("rank", ""))
    how = f"exit code {rows.get('exitcode', 'unknown').strip()} on {rows.get('host', 'an unknown host').strip()}"
    return Failed(int(rank.group()), how, rows.get("time", "").strip()) if rank else None

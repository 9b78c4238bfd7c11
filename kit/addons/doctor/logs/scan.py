"""Scans a log piece by piece. Only lines with a word of a pattern are examined one by one, so the time is linear in the
size of the log and memory is constant."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.curves import BARE_LOSS, LOSS, TIME, Curves
from kit.addons.doctor.logs.log_lines import LINE_BYTES, Line, Piece, pieces
from kit.addons.doctor.logs.patterns import DOWNLOADING, ENDED_BY_LAUNCHER, PATTERNS, WORKER_FAILED, Pattern
from kit.addons.doctor.logs.phases import phase_of
from kit.addons.doctor.logs.shapes import explained
from kit.addons.doctor.logs.tracebacks import TABLE, TRACEBACK, Failed, Traceback, read_table, read_traceback
from kit.addons.doctor.logs.waits import CALL, named

TRACEBACK_LINES = 480
"""Most lines before an error in which its phase and step are searched; tracebacks of several ranks may alternate."""
CURVE_BYTES = 1 << 22
"""Bytes of a larger log, evenly spread, in which losses and step times are read."""
MOST_MATCHES = 200
"""Most lines of one cause and one rank that are examined in a file."""
_RANKS = re.compile(rb"\n[ \t]{0,40}(?:\[(?:default|rank)?(\d{1,7})\]|[rR]ank ?(\d{1,7})\b)[:\s]")
_OF_TORCH = re.compile(r"(?!.*Error: ).*?\[(?:PG (?:ID )?0 [^\]]*)?Rank (\d{1,7})\]")
"""torch's own prefix in a line that has no other. In groups other than the default one it counts within the group."""
_STEP = re.compile(r"(?i)\bstep[ =:]+(\d{1,18})")
_SIGNS = {
    *(sign.encode() for pattern in PATTERNS for sign in pattern.signs),
    TRACEBACK,
    TABLE,
    b"Unable to shutdown",
    b"Downloading",
    b"downloading",
    b"Fetching ",
    b"Exited with exit",
    b"failed (exitcode",
    b"WorkNCCL(",
    b"last enqueued",
}


def _any_of(signs: Iterable[bytes]) -> re.Pattern[bytes]:
    """Finds any of them, grouped by first letter: about as fast as one word. "info" is not "inf"."""
    return re.compile(
        b"|".join(
            first + b"(?:" + b"|".join(re.escape(sign[1:]) + _NO_INFO * (sign == b"inf") for sign in same) + b")"
            for first, same in itertools.groupby(sorted(signs), lambda sign: re.escape(sign[:1]))
        )
    )


_NO_INFO = rb"(?!o)"
# Capital letters are rare in logs, so that words which begin with one are found several times as fast as the others.
_WORDS = tuple(_any_of(sign for sign in _SIGNS if sign[:1].isupper() == capital) for capital in (True, False))
_LONGEST = max(map(len, _SIGNS))


@dataclass
class Scan:
    """Results of the scan of one or more logs."""

    causes: list[Cause] = field(default_factory=list)
    exceptions: list[tuple[Traceback, Line]] = field(default_factory=list)
    """(traceback, the line of its exception)."""
    failed: list[tuple[Failed, Line]] = field(default_factory=list)
    """Failed processes in the launchers' reports."""
    curves: Curves = field(default_factory=Curves)
    ranks: set[int] = field(default_factory=set)
    downloading: dict[int | None, Line] = field(default_factory=dict)
    """Rank → its last line about a download."""
    calls: dict[int, str] = field(default_factory=dict)
    """Rank → the first call that NCCL named as not completed."""

    @property
    def first_failed(self) -> tuple[Failed, Line] | None:
        """The process that failed first by the launchers' reports: by the times in torchrun's tables, or else the first
        with a rank."""
        return min(self.failed, key=lambda each: (each[0].time or "~", each[0].rank is None), default=None)

    @property
    def first_rank(self) -> int | None:
        """Rank of that process."""
        return self.first_failed[0].rank if self.first_failed else None

    def read(self, path: Path) -> None:
        """Add one log."""
        found: list[Cause] = []
        by_launcher: set[str] = set()
        seen: Counter[tuple[str, int | None]] = Counter()
        steps: dict[int | None, int] = {}
        share = max(1, -(-path.stat().st_size // CURVE_BYTES))
        for piece in pieces(path):
            self.ranks |= {int(one or other) for one, other in _RANKS.findall(piece.text, max(0, piece.begin - 1))}
            if not piece.begin and (rank := piece.named(piece.text[:LINE_BYTES], 1).rank) is not None:
                self.ranks.add(rank)  # of the first line, which no line break precedes
            for position, line in _suspects(piece):
                self.ranks |= set() if line.rank is None else {line.rank}
                if match := ENDED_BY_LAUNCHER.search(line.text):
                    by_launcher.add(match.group(1))
                if DOWNLOADING.search(line.text):
                    self.downloading[line.rank] = line
                if (call := CALL.search(line.text)) and (rank := _rank_in_torchs_words(line)) is not None:
                    self.calls.setdefault(rank, named(call))
                self._failure(piece, position, line, seen)
                heading = TRACEBACK.decode() in line.text  # a notebook's has the name of the error that follows
                shown = next(((p, match) for p in PATTERNS if not heading and (match := p.shows(line.text))), None)
                if shown is not None and seen[shown[0].cause, line.rank] < MOST_MATCHES:
                    seen[shown[0].cause, line.rank] += 1
                    found.append(_cause(*shown, piece, position, line, _step_before(piece, position, line, steps)))
            self._read_curves(piece, share, steps)
        self.ranks |= {rank for cause in found for rank in cause.ranks}
        pids = re.compile(r"(?i)\bpid:? (\d+)")
        self.causes += [c for c in found if c.cause != "killed" or not by_launcher & set(pids.findall(c.evidence))]

    def _failure(self, piece: Piece, position: int, line: Line, seen: Counter[tuple[str, int | None]]) -> None:
        """Reads a traceback, or a launcher's report of a failed process."""
        if seen["exception", line.rank] >= MOST_MATCHES:
            return
        if piece.text.startswith(TABLE, position) and (failed := read_table(piece, position)):
            self.failed.append((failed, line))
        elif match := WORKER_FAILED.search(line.text):
            rank, code = match["local"] or match["task"], match["code"] or match["status"] or match["torchrun"]
            self.failed.append((Failed(None if rank is None else int(rank), f"exit code {code}"), line))
        elif piece.text.startswith(TRACEBACK, position) and (raised := read_traceback(piece, position, line.rank)):
            seen["exception", line.rank] += 1
            if raised.chained:
                handled = next((pair for pair in reversed(self.exceptions) if pair[1].rank == line.rank), None)
                self.exceptions = [pair for pair in self.exceptions if pair is not handled]
            here = Line(f"{raised.type}: {raised.message}", line.rank, line.file, line.number + raised.line)
            self.exceptions.append((raised, here))

    def _read_curves(self, piece: Piece, share: int, steps: dict[int | None, int]) -> None:
        stop = piece.begin + (piece.end - piece.begin) // share
        for regex, add in (
            (LOSS, self.curves.add_loss),
            (BARE_LOSS, self.curves.add_loss),
            (TIME, self.curves.add_time),
        ):
            matches = regex.finditer(piece.text, piece.begin, stop)
            for match, number in piece.numbered(matches):
                line, said = piece.line_at(match, number), match.groupdict().get("step")
                step = None if said is None else int(said)
                if step is not None:
                    steps[line.rank] = step
                add(float(match["value"]), step, line)


def _suspects(piece: Piece) -> Iterator[tuple[int, Line]]:
    """(position, line) of every line of the piece that has a word of a pattern, each line once. For a traceback or a
    table: the position of its heading."""
    reach = min(len(piece.text), piece.end + _LONGEST)
    found = (match for words in _WORDS for match in words.finditer(piece.text, piece.begin, reach))
    own = (match for match in found if match.start() < piece.end)
    line_end = -1
    for match, number in piece.numbered(sorted(own, key=lambda match: match.start())):
        position = match.start()
        if position >= line_end or piece.text.startswith((TRACEBACK, TABLE), position):
            start, line_end = piece.span(position)
            yield position, piece.named(piece.text[start:line_end], number)


def _cause(pattern: Pattern, match: re.Match[str], piece: Piece, position: int, line: Line, step: int | None) -> Cause:
    ended = line.rank is None and pattern.cause in ("killed", "crashed")
    by_exit = _rank_of_exit(piece, position, line) if ended else None
    rank = _rank_in_torchs_words(line) if by_exit is None else by_exit
    phase = _phase(piece, position, line) if pattern.cause.endswith("out-of-memory") else None
    gpu = match.groupdict().get("gpu")
    return Cause(
        cause=pattern.cause,
        meaning=match.expand(pattern.meaning) + explained(match.groupdict()),
        fix=match.expand(pattern.phases.get(phase or "", pattern.fix)),
        ranks=() if rank is None else (rank,),
        place=line.place,
        evidence=line.text.strip()[:1000],
        weight=pattern.weight,
        phase=phase,
        step=step,
        gpus=(gpu,) if gpu else (),
    )


def _rank_in_torchs_words(line: Line) -> int | None:
    said = _OF_TORCH.match(line.text) if line.rank is None else None
    return line.rank if said is None else int(said[1])


def _step_before(piece: Piece, position: int, line: Line, steps: dict[int | None, int]) -> int | None:
    """The step in the line itself, or else the last step that this rank logged before it."""
    own = (each.text for each in (line, *piece.before(position, TRACEBACK_LINES)) if each.rank == line.rank)
    nearest = next(filter(None, map(_STEP.search, own)), None)
    return int(nearest[1]) if nearest else steps.get(line.rank)


def _rank_of_exit(piece: Piece, position: int, line: Line) -> int | None:
    """The rank of an exit code: torchrun's summary has ``rank : 1 (local_rank: 1)`` above the exit code."""
    above = (re.search(r"^\s*rank\s*: (\d+)", before.text) for before in piece.before(position, 3))
    told = next(filter(None, above), re.search(r"\blocal_rank: (\d+)", line.text))
    return int(told[1]) if told else None


def _phase(piece: Piece, position: int, line: Line) -> str | None:
    """The phase of the run, from the same rank's traceback above an error."""
    own = (before.text for before in piece.before(position, TRACEBACK_LINES) if before.rank == line.rank)
    return phase_of(list(itertools.takewhile(lambda text: TRACEBACK.decode() not in text, own)))

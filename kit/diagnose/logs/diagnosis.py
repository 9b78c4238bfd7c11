"""Lines of all ranks → the cause, who had it first, and what to do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.diagnose.logs import flight_recorder
from kit.diagnose.logs.cause import Cause
from kit.diagnose.logs.curves import divergence, slow_ranks
from kit.diagnose.logs.patterns import DOWNLOADING, ENDED_BY_LAUNCHER, PATTERNS, PHASES, STEP, Pattern
from kit.diagnose.logs.predicted import beside_plan
from kit.diagnose.logs.reading import Line, log_files, read_lines
from kit.planner.plan import Plan

TRACEBACK_LINES = 60
"""How far back from an error its traceback is read for the phase."""


def diagnose(paths: Iterable[Path], plan: Plan | None = None) -> tuple[Cause, ...]:
    """Read logs and flight records (files, or directories of them) of one job; the root cause comes first.

    With its plan, memory that ran out is told beside what was predicted. Raises ``SpecError``.
    """
    paths = list(paths)
    recorded = flight_recorder.records(paths)
    files = [
        list(read_lines(path)) for path in log_files(path for path in paths if not flight_recorder.is_record(path))
    ]
    causes = [cause for lines in files for cause in _matches(lines)]
    everything = [line for lines in files for line in lines]
    causes = _merged([*_recorded(recorded), *causes, *slow_ranks(everything), *divergence(everything)])
    refined = _refined(causes, everything)
    if plan is None:
        return refined
    return tuple(
        replace(cause, meaning=f"{cause.meaning}; {beside_plan(cause.cause, cause.evidence, plan)}")
        if cause.cause.endswith("out-of-memory")
        else cause
        for cause in refined
    )


def _recorded(recorded: Mapping[int, tuple[str, Mapping[str, Any]]]) -> list[Cause]:
    """What the flight records of all ranks show: the collective at which they parted."""
    parted = flight_recorder.missing_rank(recorded)
    if parted is None:
        return []
    name = "mismatched-collectives" if parted.differ else "collective-timeout"
    pattern = next(pattern for pattern in PATTERNS if pattern.cause == name)
    if parted.differ:
        ranks = tuple(rank for rank, _ in parted.differ)
        others = "; ".join(f"rank {rank} called {called}" for rank, called in parted.differ)
        meaning = f"{pattern.meaning}: at {parted.what}, {others}"
    else:
        ranks = parted.came
        meaning = f"{pattern.meaning}: rank {', '.join(map(str, parted.missing))} did not come to {parted.what}"
    return [
        Cause(
            cause=name,
            meaning=meaning,
            fix=pattern.fix,
            ranks=ranks,
            place=parted.file,
            evidence=f"flight record: {len(recorded)} ranks",
            weight=pattern.weight,
        )
    ]


def _matches(lines: Sequence[Line]) -> list[Cause]:
    """Every pattern in one file, in its order."""
    found = []
    by_launcher = {match.group(1) for line in lines if (match := ENDED_BY_LAUNCHER.search(line.text))}
    step: dict[int | None, int] = {}
    for index, line in enumerate(lines):
        if (match := STEP.search(line.text)) or (match := re.search(r"(?i)\bstep[ =:]+(\d+)", line.text)):
            step[line.rank] = int(match.group(1))
        for pattern in PATTERNS:
            if pattern.regex.search(line.text):
                if pattern.cause == "killed" and by_launcher & set(re.findall(r"(?i)\bpid:? (\d+)", line.text)):
                    break
                found.append(_cause(pattern, lines, index, step.get(line.rank)))
                break
    return found


def _cause(pattern: Pattern, lines: Sequence[Line], index: int, step: int | None) -> Cause:
    line = lines[index]
    rank = line.rank
    if rank is None and pattern.cause in ("killed", "crashed"):
        rank = _rank_of_exit(lines, index)
    return Cause(
        cause=pattern.cause,
        meaning=pattern.meaning,
        fix=pattern.fix,
        ranks=() if rank is None else (rank,),
        place=line.place,
        evidence=line.text.strip()[:400],
        weight=pattern.weight,
        phase=_phase(lines, index) if pattern.cause.endswith("out-of-memory") else None,
        step=step,
    )


def _rank_of_exit(lines: Sequence[Line], index: int) -> int | None:
    """torchrun prints ``rank : 1 (local_rank: 1)`` beside an exit code, before it in its summary."""
    here = re.search(r"\blocal_rank: (\d+)", lines[index].text)
    for line in reversed(lines[max(0, index - 3) : index]):
        if match := re.search(r"^\s*rank\s*: (\d+)", line.text):
            return int(match.group(1))
    return int(here.group(1)) if here else None


def _phase(lines: Sequence[Line], index: int) -> str | None:
    """What the traceback above an error was doing: frames of the same rank, innermost first."""
    rank = lines[index].rank
    for line in reversed(lines[max(0, index - TRACEBACK_LINES) : index]):
        if line.rank != rank:
            continue
        if line.text.lstrip().startswith("Traceback"):
            break
        for phase, pattern in PHASES:
            if pattern.search(line.text):
                return phase
    return None


def _merged(causes: Sequence[Cause]) -> list[Cause]:
    """Merges equal causes of several lines into one, with all ranks and the first line."""
    groups: dict[str, list[Cause]] = defaultdict(list)
    for cause in causes:
        groups[cause.cause].append(cause)
    merged = []
    for group in groups.values():
        first = group[0]
        ranks = tuple(sorted({rank for cause in group for rank in cause.ranks}))
        phases = [cause.phase for cause in group if cause.phase]
        steps = [cause.step for cause in group if cause.step is not None]
        phase, step = phases[0] if phases else None, min(steps, default=None)
        merged.append(replace(first, ranks=ranks, phase=phase, step=step))
    return sorted(merged, key=lambda cause: -cause.weight)


def _refined(causes: list[Cause], lines: Sequence[Line]) -> tuple[Cause, ...]:
    """What only all ranks together show: who was missing, who downloaded, whether one rank alone ran out."""
    crashed = next((cause.ranks for cause in causes if cause.cause == "crashed"), ())
    everyone = {line.rank for line in lines if line.rank is not None}
    refined = []
    for cause in causes:
        meaning, fix = cause.meaning, cause.fix
        missing = sorted(everyone - set(cause.ranks))
        told = "did not come" in meaning  # by the flight recorder, which knows which collective
        if cause.cause == "collective-timeout" and cause.ranks and missing:
            downloading = [line for line in lines if line.rank in (*missing, None) and DOWNLOADING.search(line.text)]
            names = ", ".join(map(str, missing))
            if downloading:
                meaning = f"the others waited while rank {names} downloaded ({downloading[-1].place})"
                fix = "download to shared storage before the job starts; no node needs the hub then"
            elif not told:
                meaning = f"{meaning}: rank {names} did not come"
        if cause.cause.endswith("out-of-memory") and len(cause.ranks) == 1 and len(everyone) > 1:
            meaning = f"{meaning}, and no other: its batch was longer, or another process shares its memory"
            fix = f"bucket by length and pad alike; else {fix}"
        # A library that aborts prints no rank; the launcher tells whose process it was.
        ranks = cause.ranks or (crashed if cause.cause == "mismatched-collectives" else ())
        refined.append(replace(cause, meaning=meaning, fix=fix, ranks=ranks))
    return tuple(refined)

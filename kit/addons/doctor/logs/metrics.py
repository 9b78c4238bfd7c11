"""Causes that ``metrics.jsonl`` shows: lines that are no JSON, experts that get no tokens or far too many, and two runs
that wrote to one run directory at the same time. A single run logs each step once and in order, also after resumes and
rewinds. ``events.jsonl`` beside it names slow ranks."""

from __future__ import annotations

import json
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.log_lines import LINE_BYTES

_NAME = "metrics.jsonl"
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
_LONGEST = 1 << 16
"""Bytes of a line that are parsed; kit's own have 2,000."""
_LAST = 20
"""An uneven load must last for this many final steps, because routers are uneven at the start of training."""
HOT = 3.0
"""An expert above this many times the mean load is overloaded; balanced runs stay below 2 (docs/notes/experts.md)."""
_FIX = (
    "set job.balancing of the recipe, which pretraining plans have from the model's family; where it is set, raise "
    "moe_aux_loss_coeff, or moe_router_bias_update_rate of routers with sigmoid scores, or lower the learning rate"
)


def metrics_files(paths: Iterable[Path]) -> list[Path]:
    """Every ``metrics.jsonl`` among ``paths``, in these directories, or next to these logs."""
    files = {path if path.name == _NAME else (path if path.is_dir() else path.parent) / _NAME for path in paths}
    return [path for path in sorted(files) if path.is_file()]


def of_metrics(path: Path) -> Iterator[Cause]:
    """Causes that a ``metrics.jsonl`` shows."""
    yield from _no_json(path)
    yield from _two_runs(path)
    yield from _unbalanced_experts(path)
    yield from _slow_ranks(path.with_name("events.jsonl"))


def _no_json(path: Path) -> Iterator[Cause]:
    """Lines that are no JSON object. A half line at the end is no cause: a run that was killed leaves one. The first
    character decides for lines longer than ``_LONGEST`` bytes."""
    bad, first, number, begins = 0, (0, b""), 1, True
    with open(path, "rb") as file:
        for part in iter(lambda: file.readline(_LONGEST), b""):
            whole = part.endswith(b"\n")
            if begins and (line := part.strip()) and not (_is_object(line) if whole else line.startswith(b"{")):
                first = first if bad else (number, line)
                bad += 1
            begins, number = whole, number + whole
    if bad:
        number, line = first
        more = f", the first of {bad} such lines" if bad > 1 else ""
        yield Cause(
            cause="no-json",
            meaning=f"{path.name}: line {number} is no JSON object{more}: another program wrote there, or the disk is "
            "damaged",
            fix="metrics of those lines are lost; find out what else writes there; a resumed run leaves them out",
            ranks=(),
            place=f"{path}:{number}",
            evidence=repr(line[:100].decode(errors="replace")),
            weight=1,
        )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _two_runs(path: Path) -> Iterator[Cause]:
    """A cause for each step number that goes back."""
    last, number, again, first = 0, 0, 0, (0, 0, "")
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(LINE_BYTES), b""):
            number += line.endswith(b"\n")
            if match := _STEP.match(line):
                step = int(match[1])
                if step <= last:
                    first = first if again else (step, number, line.decode(errors="replace").strip())
                    again += 1
                last = max(last, step)
    if not again:
        return
    step, number, evidence = first
    yield Cause(
        cause="two-runs",
        meaning=f"two runs wrote into {path.parent.name} at once: {again} steps stand in {path.name} again, from step "
        f"{step} on, though {last} were reached",
        fix="end all but one; metrics and checkpoints since that step are of both: go back "
        "to a checkpoint before it, or train again in a new run directory",
        ranks=(),
        place=f"{path}:{number}",
        evidence=evidence,
        weight=3,
        step=step,
    )


def _unbalanced_experts(path: Path) -> Iterator[Cause]:
    last: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=_LAST)
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES), b""), 1):
            if b'"expert_load_max": ' in line:
                try:
                    row = json.loads(line)
                    values = {name: float(row[name]) for name in ("step", "expert_load_max", "dead_experts")}
                except (ValueError, LookupError, TypeError, RecursionError):
                    continue
                last.append((number, line.decode(errors="replace").strip(), values))
    if len(last) < _LAST:
        return
    number, evidence, values = last[-1]
    rows = [row for _, _, row in last]
    dead, load = min(row["dead_experts"] for row in rows), statistics.median(row["expert_load_max"] for row in rows)
    found = []
    if dead > 0:
        found.append(("dead-experts", f"{dead:.0f} or more experts got no token in any of the last {_LAST} steps"))
    if load > HOT:
        found.append(("hot-expert", f"the fullest expert had {load:.1f} times the mean load in the last {_LAST} steps"))
    for cause, meaning in found:
        yield Cause(
            cause=cause,
            meaning=meaning,
            fix=_FIX,
            ranks=(),
            place=f"{path}:{number}",
            evidence=evidence,
            weight=1,
            step=int(values["step"]),
        )


def _slow_ranks(events: Path) -> Iterator[Cause]:
    """The rank that the run named as slow last, unless it kept pace again later."""
    slow = None
    if events.is_file():
        with open(events, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES), b""), 1):
                if b'"event": "slow rank' in line:
                    try:
                        row = json.loads(line)
                        values = int(row["rank"]), str(row["host"])[:100], int(row["step"]), row.get("ratio")
                    except (ValueError, LookupError, TypeError, RecursionError):
                        continue
                    slow = (number, line, values) if row["event"] == "slow rank" else None
    if slow is None:
        return
    number, line, (rank, host, step, ratio) = slow
    times = f"{ratio:.1f} times as long as" if isinstance(ratio, int | float) else "longer than"
    yield Cause(
        cause="slow-rank",
        meaning=f"rank {rank} on {host} works {times} the others, who wait for it, since step {step}",
        fix="run kit doctor on that host: clocks, temperature, ECC, neighbours of its GPU, its disk; or drain the node",
        ranks=(rank,),
        place=f"{events}:{number}",
        evidence=line.decode(errors="replace").strip(),
        weight=2,
        step=step,
    )

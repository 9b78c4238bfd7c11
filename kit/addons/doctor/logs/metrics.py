"""Causes that ``metrics.jsonl`` shows: lines that are no JSON, experts that get no tokens or far too many, and two runs
that wrote to one run directory at the same time. A single run logs each step once and in order, also after resumes and
rewinds. ``events.jsonl`` beside it names slow ranks."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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


def _lines(path: Path, longest: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number, text) of every line; of a long one the first bytes, without its end."""
    number, begins = 1, True
    with open(path, "rb") as file:
        for part in iter(lambda: file.readline(longest), b""):
            if begins:
                yield number, part
            begins = part.endswith(b"\n")
            number += begins


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it holds none."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def _rows(path: Path, sign: bytes, numbers: Sequence[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line, its text, its object) where the text holds ``sign`` and the object these numbers."""
    for number, line in _lines(path):
        row = _object(line) if sign in line else None
        if row is not None and all(isinstance(row.get(name), int | float) for name in numbers):
            yield number, line.decode(errors="replace").strip(), row


def _no_json(path: Path) -> Iterator[Cause]:
    """Lines that are no JSON object. A half line at the end is no cause: a run that was killed leaves one. The first
    character decides for lines longer than ``_LONGEST`` bytes."""
    lines = ((number, part.strip(), part.endswith(b"\n")) for number, part in _lines(path, _LONGEST))
    bad = (
        (number, line)
        for number, line, whole in lines
        if line and (_object(line) is None if whole else not line.startswith(b"{"))
    )
    if (first := next(bad, None)) is not None:
        number, line = first
        others = sum(1 for _ in bad)
        more = f", the first of {1 + others} such lines" if others else ""
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


def _two_runs(path: Path) -> Iterator[Cause]:
    """A step number that goes back."""
    first, again, reached = None, 0, 0
    for number, line in _lines(path):
        if match := _STEP.match(line):
            step = int(match[1])
            if step <= reached:
                first, again = first or (step, number, line), again + 1
            reached = max(reached, step)
    if first is not None:
        step, number, line = first
        yield Cause(
            cause="two-runs",
            meaning=f"two runs wrote into {path.parent.name} at once: {again} steps stand in {path.name} again, from "
            f"step {step} on, though {reached} were reached",
            fix="end all but one; metrics and checkpoints since that step are of both: go back "
            "to a checkpoint before it, or train again in a new run directory",
            ranks=(),
            place=f"{path}:{number}",
            evidence=line.decode(errors="replace").strip(),
            weight=3,
            step=step,
        )


def _unbalanced_experts(path: Path) -> Iterator[Cause]:
    """An uneven load in all of the last steps."""
    last = deque(_rows(path, b'"expert_load_max": ', ("step", "expert_load_max", "dead_experts")), _LAST)
    if len(last) < _LAST:
        return
    number, evidence, newest = last[-1]
    dead = min(row["dead_experts"] for _, _, row in last)
    load = statistics.median(row["expert_load_max"] for _, _, row in last)
    found = {
        "dead-experts": dead > 0 and f"{dead:.0f} or more experts got no token in any of the last {_LAST} steps",
        "hot-expert": load > HOT and f"the fullest expert had {load:.1f} times the mean load in the last {_LAST} steps",
    }
    for cause, meaning in found.items():
        if meaning:
            yield Cause(
                cause=cause,
                meaning=meaning,
                fix=_FIX,
                ranks=(),
                place=f"{path}:{number}",
                evidence=evidence,
                weight=1,
                step=int(newest["step"]),
            )


def _slow_ranks(events: Path) -> Iterator[Cause]:
    """The rank that the run named as slow last, unless it kept pace again later."""
    told = _rows(events, b'"event": "slow rank', ("rank", "step")) if events.is_file() else ()
    number, evidence, row = next(iter(deque(told, 1)), (0, "", {}))
    if row.get("event") == "slow rank":
        rank, step, ratio = int(row["rank"]), int(row["step"]), row.get("ratio")
        host = str(row.get("host", "an unknown host"))[:100]
        times = f"{ratio:.1f} times as long as" if isinstance(ratio, int | float) else "longer than"
        yield Cause(
            cause="slow-rank",
            meaning=f"rank {rank} on {host} works {times} the others, who wait for it, since step {step}",
            fix="run kit doctor on that host: clocks, temperature, ECC, neighbours of its GPU, its disk; or drain the "
            "node",
            ranks=(rank,),
            place=f"{events}:{number}",
            evidence=evidence,
            weight=2,
            step=step,
        )

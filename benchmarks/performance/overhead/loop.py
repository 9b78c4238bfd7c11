"""Our own time in every step, with the engine's taken away; and how long training stands still for checkpoints, at once
and by a thread."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.engines.base import Engine
from kit.engines.torch.engine import TorchEngine
from kit.rehearsal.processes import metrics
from kit.training.loop import train
from tests.support import small_run
from tests.support.alone import process_group_of_one

STEPS = 60
EVERY, SAVED_STEPS = 20, 61


@dataclass(frozen=True)
class Own:
    """Medians over the steps of a run, in milliseconds."""

    wall_ms: float
    """From the end of an engine's call to the beginning of the next, reading data included."""
    cpu_ms: float
    """Processor time of this thread, which other programs on the machine do not change."""
    engine_ms: float


Call = tuple[str, float, float, float, float]
"""(method, wall and processor time when it begins and when it ends)."""


def timed_calls(engine: Engine) -> list[Call]:
    """The engine's calls from now on, in the order in which they end; the list grows."""
    calls: list[Call] = []
    for name in ("forward_backward", "gradient_norm", "apply"):
        setattr(engine, name, functools.partial(_timed, calls, name, getattr(engine, name)))
    return calls


def _timed(calls: list[Call], name: str, method: Callable[..., Any], *given: Any) -> Any:
    wall, cpu = time.perf_counter(), time.thread_time()
    result = method(*given)
    calls.append((name, wall, time.perf_counter(), cpu, time.thread_time()))
    return result


def own_time(directory: Path) -> Own:
    """Times a run that logs and checks every step and saves no checkpoint."""
    with process_group_of_one():
        rundir = small_run.emit(directory / "timed", f"run.steps={STEPS}")
        engine = TorchEngine(rundir)
        calls = timed_calls(engine)
        train(engine, rundir, export_at_end=False)
        engine.close()
    turns: list[tuple[float, float, float]] = []
    begins = [index for index, call in enumerate(calls) if call[0] == "forward_backward"]
    for begin, end in itertools.pairwise(begins):
        turn = calls[begin : end + 1]
        gaps = [(after[1] - before[2], after[3] - before[4]) for before, after in itertools.pairwise(turn)]
        inside = sum(call[2] - call[1] for call in turn[:-1])
        turns.append((sum(wall for wall, _ in gaps), sum(cpu for _, cpu in gaps), inside))
    middle = [1000 * statistics.median(column) for column in zip(*turns[2:], strict=True)]
    return Own(*middle)


@dataclass(frozen=True)
class Stall:
    """Time that one run waited for its checkpoints."""

    share: float
    """Stalls over the time of all steps but the first."""
    stall_ms: float
    """Milliseconds that one checkpoint stops training."""
    step_ms: float
    checkpoint_mib: float


def stall(directory: Path, asynchronous: bool) -> Stall:
    """A model of 13 million parameters, saved every 20 steps; the checkpoint after the last step is not counted."""
    words = (
        f"run.steps={SAVED_STEPS}",
        f"run.checkpoint.every_steps={EVERY}",
        f"run.checkpoint.asynchronous={str(asynchronous).lower()}",
    )
    with process_group_of_one():
        rundir = small_run.emit(
            directory / f"saved-{asynchronous}", *words, hidden=512, layers=3, seq_length=256, batch=2
        )
        engine = TorchEngine(rundir)
        summary = train(engine, rundir, export_at_end=False)
        engine.close()
    rows = metrics(rundir.path)
    stalls = [row["checkpoint_s"] for row in rows[:-1] if row["checkpoint_s"] is not None]
    steps = [row["step_time_s"] for row in rows[1:]]
    assert len(stalls) == (SAVED_STEPS - 1) // EVERY
    return Stall(
        share=sum(stalls) / (sum(steps) + sum(stalls)),
        stall_ms=1000 * sum(stalls) / len(stalls),
        step_ms=1000 * sum(steps) / len(steps),
        checkpoint_mib=1024 * (summary.measured_checkpoint_gib or 0.0),
    )

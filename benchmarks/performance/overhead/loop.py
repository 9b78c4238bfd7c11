"""Our own time in every step, with the engine's taken away; and how long training stands still for checkpoints, at once
and by a thread."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.engines.protocol import Engine
from kit.engines.torch.engine import TorchEngine
from kit.rehearsal.processes import metrics
from kit.training.loop import train
from tests.support import small_run
from tests.support.alone import process_group_of_one

STEPS = 60
EVERY, SAVED_STEPS = 20, 61


OWN_MS = 1.0
STALL = 0.05
Verdict = tuple[bool, str]
"""Whether a limit is kept, and what was found."""
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


def own_time(directory: Path) -> Iterator[Verdict]:
    """Times a run that logs and checks every step and saves no checkpoint: the clock and this thread's processor time,
    which other programs do not change, from the end of an engine's call to the beginning of the next, reading data
    included; and the engine's own. Medians over the steps."""
    with process_group_of_one():
        rundir = small_run.emit(directory / "timed", f"run.steps={STEPS}")
        engine = TorchEngine(rundir)
        calls = timed_calls(engine)
        train(engine, rundir)
        engine.close()
    turns: list[tuple[float, float, float]] = []
    begins = [index for index, call in enumerate(calls) if call[0] == "forward_backward"]
    for begin, end in itertools.pairwise(begins):
        turn = calls[begin : end + 1]
        gaps = [(after[1] - before[2], after[3] - before[4]) for before, after in itertools.pairwise(turn)]
        inside = sum(call[2] - call[1] for call in turn[:-1])
        turns.append((sum(wall for wall, _ in gaps), sum(cpu for _, cpu in gaps), inside))
    wall_ms, cpu_ms, engine_ms = (1000 * statistics.median(column) for column in zip(*turns[2:], strict=True))
    yield (
        cpu_ms <= OWN_MS,
        f"loop: {cpu_ms:.3f} ms of processor time of our own per step (median, limit {OWN_MS:g}), "
        f"{wall_ms:.3f} ms on the clock; the engine takes {engine_ms:.1f} ms",
    )


def stalls(directory: Path) -> Iterator[Verdict]:
    """Two runs of a model of 13 million parameters, saved every 20 steps at once and by a thread: how long they wait.
    The first step and the checkpoint after the last are not counted."""
    for asynchronous in (False, True):
        yield _stall(directory, asynchronous)


def _stall(directory: Path, asynchronous: bool) -> Verdict:
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
        summary = train(engine, rundir)
        engine.close()
    rows = metrics(rundir.path)
    waits = [row["checkpoint_s"] for row in rows[:-1] if row["checkpoint_s"] is not None]
    steps = [row["step_time_s"] for row in rows[1:]]
    assert len(waits) == (SAVED_STEPS - 1) // EVERY
    share = sum(waits) / (sum(steps) + sum(waits))
    return (
        share <= STALL or not asynchronous,
        f"saving {1024 * (summary.measured_checkpoint_gib or 0.0):.0f} MiB every {EVERY} steps "
        f"{'by a thread' if asynchronous else 'at once'}: stalls of {1000 * sum(waits) / len(waits):.0f} ms beside "
        f"steps of {1000 * sum(steps) / len(steps):.0f} ms, {100 * share:.1f} % of the run",
    )

"""Our own time in every step, with the engine's taken away."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.engines.base import LossSum, MicroBatch, Norms
from kit.engines.torch.engine import TorchEngine
from kit.training.loop import train
from tests.support import small_run
from tests.training.alone import process_group_of_one

STEPS = 60


@dataclass(frozen=True)
class Own:
    """Medians over the steps of a run, in milliseconds."""

    wall_ms: float
    """From the end of an engine's call to the beginning of the next, reading data included."""
    cpu_ms: float
    """Processor time of this thread, which other programs on the machine do not change."""
    engine_ms: float


class Timed(TorchEngine):
    """The engine, with the clock stopped while it works."""

    def __init__(self, rundir: Any) -> None:
        super().__init__(rundir)
        self.calls: list[tuple[str, float, float, float, float]] = []
        """(call, wall and processor time at its begin and end)."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Calls the engine and records the time."""
        return self._timed("forward_backward", lambda: super(Timed, self).forward_backward(micro_batches))

    def gradient_norm(self) -> float:
        """Calls the engine and records the time."""
        return self._timed("gradient_norm", lambda: super(Timed, self).gradient_norm())

    def apply(self, learning_rate: float) -> Norms:
        """Calls the engine and records the time."""
        return self._timed("apply", lambda: super(Timed, self).apply(learning_rate))

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = work()
        self.calls.append((name, wall, time.perf_counter(), cpu, time.thread_time()))
        return result


def own_time(directory: Path) -> Own:
    """Times a run that logs and checks every step and saves no checkpoint."""
    with process_group_of_one():
        rundir = small_run.emit(directory / "timed", f"run.steps={STEPS}")
        engine = Timed(rundir)
        train(engine, rundir, export_at_end=False)
        engine.close()
    turns: list[tuple[float, float, float]] = []
    begins = [index for index, call in enumerate(engine.calls) if call[0] == "forward_backward"]
    for begin, end in itertools.pairwise(begins):
        calls = engine.calls[begin : end + 1]
        gaps = [(after[1] - before[2], after[3] - before[4]) for before, after in itertools.pairwise(calls)]
        inside = sum(call[2] - call[1] for call in calls[:-1])
        turns.append((sum(wall for wall, _ in gaps), sum(cpu for _, cpu in gaps), inside))
    middle = [1000 * statistics.median(column) for column in zip(*turns[2:], strict=True)]
    return Own(*middle)

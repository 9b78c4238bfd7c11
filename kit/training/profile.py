"""``--profile FIRST-LAST``: a trace of these steps by torch's profiler, and what it says in a few lines.

Every rank writes ``profile/rank-NNNNN.json``, which Perfetto (ui.perfetto.dev) opens. Under Nsight Systems, which has
to be alone with CUPTI, nothing is traced here: the steps become its capture range, with their parts as ranges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kit.training.determinism import rank
from kit.training.trace import read_trace, trace_report

_FOLDER = "profile"
_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID"
"""Set by ``nsys profile`` in what it starts."""
PREFIX = "kit:"
"""Prefix of the loop's own parts in a trace."""


class Profiler:
    """Two comparisons a step where no trace is wanted."""

    def __init__(self, steps: tuple[int, int] | None, rundir: Path) -> None:
        """``steps``: first and last, both included; a resumed run that begins between them traces from there."""
        self._steps, self._directory = steps, rundir / _FOLDER
        self._trace: Any = None
        self._for_nsight = False
        self._began_s, self._first = 0.0, 0

    def begin(self, step: int) -> None:
        """Call before a step."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1] or self._trace or self._for_nsight:
            return
        self._began_s, self._first = time.perf_counter(), step
        if _UNDER_NSIGHT in os.environ and torch.cuda.is_available():
            self._for_nsight = True
            torch.cuda.profiler.start()
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._trace = profile(activities=activities)
        self._trace.start()

    def end(self, step: int, log: Callable[[str], None]) -> None:
        """Call after a step. After the last one the main rank writes and summarises its own trace."""
        if self._steps is None or step < self._steps[1]:
            return
        if self._for_nsight:
            torch.cuda.profiler.stop()
            self._for_nsight, self._steps = False, None
        if self._trace is None:
            return
        seconds = time.perf_counter() - self._began_s
        self._trace.stop()
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"rank-{rank():05d}.json"
        self._trace.export_chrome_trace(str(path))
        self._trace, self._steps = None, None
        steps = f"{self._first}-{step}"
        log(f"profile of steps {steps} (rank {rank()}, {path.parent.name}/{path.name}; open it in ui.perfetto.dev)")
        for line in trace_report(read_trace(path), seconds, PREFIX):
            log(line)

    def span(self, name: str) -> AbstractContextManager[object]:
        """A part of the step, to be found in the trace."""
        if self._trace is not None:
            return record_function(PREFIX + name)
        return _nsight_range(name) if self._for_nsight else nullcontext()


@contextmanager
def _nsight_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()

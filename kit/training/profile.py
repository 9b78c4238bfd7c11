"""``--profile FIRST-LAST``: traces these steps with torch's profiler, and prints a short report.

Every rank writes ``profile/rank-NNNNN.json``, which Perfetto (ui.perfetto.dev) opens. Nsight Systems does not share
CUPTI with another profiler. Under it kit writes no trace: the steps become its capture range, and their parts NVTX
ranges.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from kit.engines.collective import rank

_FOLDER = "profile"
_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID"
"""Environment variable that ``nsys profile`` sets."""
PREFIX = "kit:"
"""Prefix of the names of the loop's parts in a trace."""
_PARTS = {"data": "data wait", "forward_backward": "forward and backward", "optimizer": "optimizer"}
"""Part of the loop → its words in the report."""
_COMMUNICATES = ("nccl", "gloo:", "nvshmem", "rccl")
"""How names of communication begin, after punctuation: NCCL's kernels, gloo's operations."""
_NOT_WORK = ("c10d::", "record_param_comms", "autograd::engine", "ProfilerStep")
"""How names of operators begin that only start or wrap other operators."""
_TOP = 8
"""Kernels or operators that the report lists."""
_Interval = tuple[float, float]


class Profiler:
    """Traces a range of steps. Costs two comparisons per step without ``--profile``."""

    def __init__(self, steps: tuple[int, int] | None, rundir: Path) -> None:
        """``steps``: (first, last), both included. A run that resumes between them traces from its first step."""
        self._steps, self._directory = steps, rundir / _FOLDER
        self._trace: Any = None
        """What records now: torch's profile, or for Nsight Systems the module that starts and stops its capture."""
        self._began_s, self._first = 0.0, 0

    def begin(self, step: int) -> None:
        """Call before a step. Starts the trace at the first step of the range."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1] or self._trace is not None:
            return
        self._began_s, self._first = time.perf_counter(), step
        if _UNDER_NSIGHT in os.environ and torch.cuda.is_available():
            self._trace = torch.cuda.profiler
        else:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._trace.start()

    def end(self, step: int, log: Callable[[str], None]) -> None:
        """Call after a step. After the last step, every rank writes its trace and passes the lines of its report to
        ``log``."""
        if self._trace is None or self._steps is None or step < self._steps[1]:
            return
        seconds = time.perf_counter() - self._began_s
        trace, self._trace, self._steps = self._trace, None, None
        trace.stop()
        if trace is torch.cuda.profiler:
            return
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"rank-{rank():05d}.json"
        trace.export_chrome_trace(str(path))
        steps = f"{self._first}-{step}"
        log(f"profile of steps {steps} (rank {rank()}, {path.parent.name}/{path.name}; open it in ui.perfetto.dev)")
        for line in report(trace.events(), seconds):
            log(line)

    def span(self, name: str) -> AbstractContextManager[object]:
        """Context that marks a part of the step in the trace."""
        if self._trace is torch.cuda.profiler:
            return torch.cuda.nvtx.range(name)
        return nullcontext() if self._trace is None else record_function(PREFIX + name)


def report(events: Sequence[FunctionEvent], seconds: float) -> list[str]:
    """Lines of text about the events of a trace of so many seconds: shares of the time, of which overlapping intervals
    count once, and the longest kernels, or on a CPU operators without those that they call."""
    whole_us = 1e6 * seconds
    on_gpu = [each for each in events if not (_is_on_cpu(each) or each.is_user_annotation)]
    on_cpu = [each for each in events if not each.is_user_annotation or _communicates(each)]
    work = [each for each in on_gpu or on_cpu if not each.name.startswith(_NOT_WORK)]
    computing, talking = (
        _intervals(each for each in work if _communicates(each) == wanted) for wanted in (False, True)
    )
    busy_us = total(union([*computing, *talking]))
    parts: dict[str, float] = defaultdict(float)
    own_us: dict[str, float] = defaultdict(float)
    for each in events:
        if _is_on_cpu(each) and each.name.startswith(PREFIX):
            parts[each.name.removeprefix(PREFIX)] += each.time_range.elapsed_us()
    for each in work:  # torch counts no time of its own for kernels, and for what runs beside its caller
        nested = not on_gpu and not each.is_async
        own_us[each.name] += each.self_cpu_time_total if nested else each.time_range.elapsed_us()
    times = Counter(each.name for each in work)
    told = {words: parts[name] for name, words in _PARTS.items()}
    told["between"] = max(0.0, whole_us - sum(parts.values()))
    return [
        "  " + ", ".join(f"{words} {100 * time_us / whole_us:.1f} %" for words, time_us in told.items()),
        f"  {'GPU' if on_gpu else 'CPU'}: computes {100 * total(computing) / whole_us:.1f} %, "
        f"communicates {100 * total(talking) / whole_us:.1f} % (exposed "
        f"{100 * (busy_us - total(computing)) / whole_us:.1f} %), idles {100 * max(0.0, 1 - busy_us / whole_us):.1f} %",
        *(
            f"  {100 * time_us / whole_us:5.1f} %  {time_us / 1000:9.2f} ms  {times[name]:6d} ×  {name[:90]}"
            for name, time_us in sorted(own_us.items(), key=lambda item: -item[1])[:_TOP]
        ),
    ]


def _is_on_cpu(event: FunctionEvent) -> bool:
    return bool(event.device_type.name == "CPU")


def _communicates(event: FunctionEvent) -> bool:
    return bool(event.name.lstrip("_").lower().startswith(_COMMUNICATES))


def _intervals(events: Iterable[FunctionEvent]) -> list[_Interval]:
    """The time of any of the events, in microseconds."""
    return union([(each.time_range.start, each.time_range.end) for each in events])


def union(intervals: Sequence[_Interval]) -> list[_Interval]:
    """Merges intervals that overlap or touch."""
    merged: list[_Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def total(intervals: Iterable[_Interval]) -> float:
    """Sum of the lengths of intervals."""
    return sum(end - begin for begin, end in intervals)

"""``--profile FIRST-LAST``: traces these steps with torch's profiler, and prints a short report.

Every rank writes ``profile/rank-NNNNN.json``, which Perfetto (ui.perfetto.dev) opens. Nsight Systems does not share
CUPTI with another profiler. Under it kit writes no trace: the steps become its capture range, and their parts NVTX
ranges.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kit.engines.collective import rank

_FOLDER = "profile"
_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID"
"""Environment variable that ``nsys profile`` sets."""
PREFIX = "kit:"
"""Prefix of the names of the loop's parts in a trace."""


class Profiler:
    """Traces a range of steps. Costs two comparisons per step without ``--profile``."""

    def __init__(self, steps: tuple[int, int] | None, rundir: Path) -> None:
        """``steps``: (first, last), both included. A run that resumes between them traces from its first step."""
        self._steps, self._directory = steps, rundir / _FOLDER
        self._trace: Any = None
        self._for_nsight = False
        self._began_s, self._first = 0.0, 0

    def begin(self, step: int) -> None:
        """Call before a step. Starts the trace at the first step of the range."""
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
        """Call after a step. After the last step, every rank writes its trace and passes the lines of its report to
        ``log``."""
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
        """Context that marks a part of the step in the trace."""
        if self._trace is not None:
            return record_function(PREFIX + name)
        return torch.cuda.nvtx.range(name) if self._for_nsight else nullcontext()


_Interval = tuple[float, float]

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of GPU activities in a trace (libkineto's names)."""
_COMMUNICATES = ("nccl", "gloo:", "nvshmem", "rccl")
"""How names of communication begin, after punctuation: NCCL's kernels, gloo's operations."""
_NOT_WORK = ("c10d::", "record_param_comms", "autograd::engine", "ProfilerStep")
"""How names of operators begin that only start or wrap other operators."""


@dataclass(frozen=True)
class Work:
    """One kernel or operator that ran."""

    name: str
    begin_us: float
    end_us: float
    communicates: bool


@dataclass(frozen=True)
class Trace:
    """The values that the report needs from a trace."""

    work: tuple[Work, ...]
    parts: Mapping[str, float]
    """Name of a part of the loop → microseconds."""
    on_gpu: bool


@dataclass(frozen=True)
class Shares:
    """Fractions of the traced time."""

    compute: float
    communication: float
    exposed: float
    """Communication without simultaneous compute."""
    idle: float
    """Time with neither compute nor communication."""


def read_trace(path: Path) -> Trace:
    """Read a trace that ``export_chrome_trace`` wrote."""
    return parse(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def parse(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Build a ``Trace`` from the complete events ("X") of a Chrome trace."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_gpu = any(event.get("cat") in _ON_GPU for event in complete)
    parts: dict[str, float] = defaultdict(float)
    work = []
    for event in complete:
        name, category = str(event["name"]), event.get("cat")
        if category == "user_annotation" and ":" in name:
            parts[name] += float(event["dur"])
        communicates = name.lstrip("_").lower().startswith(_COMMUNICATES)
        counts = category in _ON_GPU if on_gpu else category == "cpu_op" or communicates
        if counts and not name.startswith(_NOT_WORK):
            begin = float(event["ts"])
            work.append(Work(name, begin, begin + float(event["dur"]), communicates))
    return Trace(tuple(work), dict(parts), on_gpu)


def shares(work: Sequence[Work], whole_us: float) -> Shares:
    """Fractions of ``whole_us``. Overlapping intervals count once."""
    computing = union([(each.begin_us, each.end_us) for each in work if not each.communicates])
    talking = union([(each.begin_us, each.end_us) for each in work if each.communicates])
    both = union([*computing, *talking])
    return Shares(
        compute=total(computing) / whole_us,
        communication=total(talking) / whole_us,
        exposed=(total(both) - total(computing)) / whole_us,
        idle=max(0.0, 1 - total(both) / whole_us),
    )


def own_times(work: Sequence[Work]) -> dict[str, tuple[float, int]]:
    """Name → (microseconds without nested work, number of calls). Operators on a CPU call each other; kernels on one
    stream do not."""
    own: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    stack: list[Work] = []
    for each in sorted(work, key=lambda one: (one.begin_us, -one.end_us)):
        while stack and stack[-1].end_us <= each.begin_us:
            stack.pop()
        duration = each.end_us - each.begin_us
        if stack and each.end_us <= stack[-1].end_us:
            own[stack[-1].name] -= duration
        own[each.name] += duration
        count[each.name] += 1
        stack.append(each)
    return {name: (time, count[name]) for name, time in own.items()}


def trace_report(trace: Trace, seconds: float, prefix: str, top: int = 8) -> list[str]:
    """Lines of text: shares of the time, and the ``top`` longest kernels or operators."""
    whole_us = 1e6 * seconds
    found = shares(trace.work, whole_us)
    parts = {
        name.removeprefix(prefix): time / whole_us for name, time in trace.parts.items() if name.startswith(prefix)
    }
    where = "GPU" if trace.on_gpu else "CPU"
    lines = [
        "  " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in _named(parts).items()),
        f"  {where}: computes {100 * found.compute:.1f} %, communicates {100 * found.communication:.1f} % (exposed "
        f"{100 * found.exposed:.1f} %), idles {100 * found.idle:.1f} %",
    ]
    ranked = sorted(own_times(trace.work).items(), key=lambda item: -item[1][0])[:top]
    for name, (time_us, times) in ranked:
        lines.append(f"  {100 * time_us / whole_us:5.1f} %  {time_us / 1000:9.2f} ms  {times:6d} ×  {name[:90]}")
    return lines


def _named(parts: Mapping[str, float]) -> dict[str, float]:
    words = {"data": "data wait", "forward_backward": "forward and backward", "optimizer": "optimizer"}
    return {word: parts.get(name, 0.0) for name, word in words.items()} | {"between": max(0.0, 1 - sum(parts.values()))}


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

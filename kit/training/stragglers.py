"""Names a slow rank while the run goes on.

In synchronous training every rank has the same step time, because all wait for the slowest. So each rank times its own
work: waiting for data, and the forward of its innermost modules, between whose calls the engines communicate. Three of
ten steps are timed, and the ranks exchange the shortest of these times: noise of the machine rarely hits all three.
Megatron-LM's StragglerDetector and nvidia-resiliency-ext compare ranks in the same way; the first times the whole
forward of a micro batch, in which ZeRO-3, FSDP and tensor parallelism wait for other ranks.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from kit.engines.collective import gather, host_group
from kit.engines.protocol import Engine, MicroBatch
from kit.planner.plan import Plan
from kit.training.logging.metrics import RunOutput

EVERY_STEPS = 10
"""Ranks exchange their times after every such number of steps."""
TIMED_STEPS = 3
"""Number of steps before the exchange that are timed."""
SLOW = 1.5
"""A rank is slow if it works this many times as long as the median of the other ranks of its pipeline stage, in two
exchanges in succession."""
_LEAST, _LEAST_S = 0.02, 0.001
"""And if the difference is this part of the step, and so many seconds: below that it costs too little."""
_MOST_CALLS = 4096
"""Calls of modules that are timed in a step; on a GPU each needs two events."""


class Slowest(NamedTuple):
    """The rank whose own work takes longest, compared with the other ranks of its stage."""

    rank: int
    ratio: float
    """Its time over the median of the others."""
    excess_s: float
    """Its time less the median of the others, seconds per step."""


class Stragglers:
    """Times this rank's own work in some steps, compares ranks, and names a slow one. The constructor is collective."""

    def __init__(self, engine: Engine, plan: Plan, log: RunOutput) -> None:
        self._engine, self._log, self._stages = engine, log, plan.layout.pp
        self._nominal_tokens = plan.layout.global_batch_size * plan.job.seq_length / engine.dp_size
        self._hosts = gather(platform.node())
        self._group = host_group()
        self._timer: _Timer | None = None
        self._times_s: list[float] = []
        self._last: int | None = None
        self._named: int | None = None

    @contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Enter around forward and backward of a step. Does nothing in most steps."""
        self._timer = None
        if len(self._hosts) == 1 or -step % EVERY_STEPS >= TIMED_STEPS:
            yield
            return
        self._timer = _Timer(torch.cuda.is_available() and torch.cuda.is_initialized())
        with self._timer.of(_innermost(self._engine.modules())):
            yield

    def sample(self, data_s: float, batch: Sequence[MicroBatch]) -> None:
        """Add the time of the step that was timed. ``data_s``: wait for data. Rows that are shorter than the job's
        sequences, as in fine-tuning, count as if they were as long."""
        if self._timer is not None:
            tokens = sum(each.input_ids.numel() for each in batch)
            self._times_s.append(data_s + self._timer.total_s() * self._nominal_tokens / max(tokens, 1))
            self._timer = None

    def judge(self, step: int, step_s: float) -> Slowest | None:
        """Collective. After the last of the timed steps, the slowest rank; None after other steps. The main rank logs a
        slow rank, and its return to the others' pace."""
        if step % EVERY_STEPS or len(self._hosts) == 1:
            return None
        mine, self._times_s = min(self._times_s, default=0.0), []
        worst = slowest(gather(mine, self._group), self._stages)
        if worst is not None:
            self._name(worst, step, step_s)
        return worst

    def _name(self, worst: Slowest, step: int, step_s: float) -> None:
        slow = worst.rank if is_slow(worst, step_s) else None
        if slow is not None and slow == self._last != self._named:
            where = self._hosts[slow]
            told = f"works {worst.ratio:.1f} times as long as the others, {1000 * worst.excess_s:.3g} ms more a step"
            self._log.log(f"slow rank {slow} on {where}: {told}; all wait for it: look at that node (kit doctor)")
            self._log.log_event("slow rank", step, rank=slow, host=where, ratio=worst.ratio, excess_s=worst.excess_s)
            self._named = slow
        if slow is None and self._last is None and self._named is not None:
            self._log.log(f"rank {self._named} on {self._hosts[self._named]} keeps pace again")
            self._log.log_event("slow rank keeps pace", step, rank=self._named, host=self._hosts[self._named])
            self._named = None
        self._last = slow


def is_slow(worst: Slowest, step_s: float) -> bool:
    """Whether a rank is slow enough to be named, in steps of ``step_s``."""
    return worst.ratio > SLOW and worst.excess_s > max(_LEAST * step_s, _LEAST_S)


def slowest(times_s: Sequence[float], stages: int) -> Slowest | None:
    """The rank with the largest ratio of its time to the median of the other ranks of its pipeline stage. Stages have
    different layers, and equal numbers of consecutive ranks. None if no rank has another to be compared with."""
    size = len(times_s) // stages
    found = []
    for number, mine in enumerate(times_s):
        first = number // size * size
        others = [times_s[other] for other in range(first, first + size) if other != number]
        if others and (usual := statistics.median(others)) > 0:
            found.append(Slowest(number, mine / usual, mine - usual))
    return max(found, key=lambda each: each.ratio, default=None)


def _innermost(modules: Any) -> list[torch.nn.Module]:
    """Modules without children. A compiled module counts as one: a hook inside would compile it again."""
    compiled = {name for name, module in modules.items() if hasattr(module.forward, "_torchdynamo_orig_callable")}
    leaves = {name for name, module in modules.items() if next(module.children(), None) is None}
    inside = {name for name in leaves if any(name.startswith(f"{outer}.") for outer in compiled)}
    return [modules[name] for name in compiled | (leaves - inside)]


class _Timer:
    """Adds up the time of forward calls: on the device's clock for a GPU, whose host runs ahead; else on the host's."""

    def __init__(self, on_gpu: bool) -> None:
        self._now: Callable[[], Any] = _event if on_gpu else time.perf_counter
        self._open: dict[int, Any] = {}
        self._calls: list[tuple[Any, Any]] = []

    @contextmanager
    def of(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Time these modules while entered. The hooks are the innermost ones: other hooks fetch weights."""
        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(self._begin))
                hooks.enter_context(module.register_forward_hook(self._end, prepend=True))
            yield

    def _begin(self, module: torch.nn.Module, _inputs: Any) -> None:
        if len(self._calls) < _MOST_CALLS:
            self._open[id(module)] = self._now()

    def _end(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if (began := self._open.pop(id(module), None)) is not None:
            self._calls.append((began, self._now()))

    def total_s(self) -> float:
        """Seconds in all calls. The device must have reached them."""
        if self._now is not _event:
            return float(sum(end - began for began, end in self._calls))
        return float(sum(began.elapsed_time(end) for began, end in self._calls)) / 1000


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

"""Weigh every layout, and take the fastest legal one that fits.

Enumerate (``candidates``), drop what breaks a rule (``rules``) or does not fit (``kit.cost``), rank by predicted time
per token, and among those that are equally fast within the model's precision take the simplest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kit.cost.efficiency import usable_gib
from kit.cost.memory import peak_gib
from kit.cost.step_time import StepTimer
from kit.cost.workload import Workload
from kit.planner import calibration
from kit.planner.calibration import Calibration
from kit.planner.candidates import Scope, layouts
from kit.planner.rules import Violation, is_legal, violations
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import ENGINES, EngineName, Layout, Pins
from kit.specs.model import ModelSpec

ENGINES_ALIKE = 1.05
"""Step times of different engines that are closer than this are not told apart: the simpler engine is taken."""
EQUALLY_FAST = 1.01
"""The same for layouts of one engine, which share most of their error. Of 48 sets of measured layouts the simplest
within a hundredth takes 3.7 % longer than the best in the mean, the fastest 3.1 %; within a twentieth it takes 6.3 %
(python -m benchmarks.accuracy throughput, docs/findings.md)."""

USUAL = Scope()
LAST_RESORTS = Scope(offload=True, nvme=True, short_contexts=True)


@dataclass(frozen=True)
class Candidate:
    """A legal layout and what it would cost."""

    layout: Layout
    peak_gib: float
    step_time_s: float | None
    """None where it does not fit."""


@dataclass(frozen=True)
class Found:
    """Outcome of a search."""

    best: Candidate | None
    considered: tuple[Candidate, ...]
    """Every legal layout that was weighed, fitting or not."""
    scope: Scope


def search(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, known: Calibration = calibration.NONE
) -> Found:
    """Search the usual layouts, and what is slower only where those do not fit."""
    weigh = _Scales(model, cluster, job, known)
    usual = _search(weigh, pins, USUAL)
    if usual.best is not None:
        return usual
    return _search(weigh, pins, LAST_RESORTS)


class _Scales:
    """What is asked of every layout of one model, cluster and job."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, known: Calibration) -> None:
        self.model, self.cluster, self.job, self.known = model, cluster, job, known
        self._timer = StepTimer(model, cluster, job)

    def peak_gib(self, layout: Layout) -> float:
        extra = self.known.of(self.model, self.cluster, self.job, layout).extra_gib if self.known.residuals else 0.0
        return peak_gib(self.model, self.cluster, self.job, layout) + extra

    def step_time_s(self, layout: Layout) -> float:
        seconds = sum(self._timer.components_s(layout).values())
        if not self.known.residuals:
            return seconds
        return seconds * self.known.of(self.model, self.cluster, self.job, layout).step_time_factor


def _search(weigh: _Scales, pins: Pins, scope: Scope) -> Found:
    considered = tuple(candidate for engine in _engines(pins) for candidate in _considered(weigh, pins, engine, scope))
    return Found(best=_best(considered), considered=considered, scope=scope)


def illegal(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, engines: tuple[EngineName, ...] | None = None
) -> dict[EngineName, tuple[Violation, ...]]:
    """For each engine (of those given) without a legal layout: the rules that its least illegal one breaks."""
    reasons: dict[EngineName, tuple[Violation, ...]] = {}
    for engine in engines or _engines(pins):
        broken = (
            violations(Workload(model=model, cluster=cluster, job=job, layout=layout))
            for layout in layouts(model, cluster, job, pins, engine, LAST_RESORTS)
        )
        fewest = min(broken, key=len, default=())
        if fewest:
            reasons[engine] = fewest
    return reasons


def engine_simplicity(layout: Layout) -> int:
    """Smaller is simpler. DeepSpeed over Megatron's layers, and FSDP2 over DTensor's tensor parallelism, are two ways
    of splitting at once."""
    both = (layout.engine == "deepspeed" and layout.implementation != "huggingface") or (
        layout.engine == "torch" and layout.tp > 1
    )
    return len(ENGINES) if both else ENGINES.index(layout.engine)


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Smaller is simpler: fewer moving parts, then less memory traffic."""
    return (
        engine_simplicity(layout),
        _FARNESS[layout.offload_optimizer] + _FARNESS[layout.offload_param],
        layout.pp,
        layout.tp * layout.cp,
        int(layout.cp_comm_type == "p2p"),
        layout.ep,
        layout.vp,
        ("none", "selective", "full").index(layout.recompute),
        layout.zero_stage,
        layout.zero_hpz,
        layout.chunked_loss + layout.compile_layers,
        layout.micro_batch_size,
    )


_FARNESS = {"none": 0, "cpu": 1, "nvme": 2}


def _engines(pins: Pins) -> tuple[EngineName, ...]:
    return ENGINES if pins.engine is None else (pins.engine,)


def _considered(weigh: _Scales, pins: Pins, engine: EngineName, scope: Scope) -> Iterator[Candidate]:
    model, cluster, job = weigh.model, weigh.cluster, weigh.job
    usable = usable_gib(cluster.gpu)
    previous: Layout | None = None
    previous_fits = True
    for layout in layouts(model, cluster, job, pins, engine, scope):
        if not previous_fits and previous is not None and _only_micro_batch_grew(previous, layout):
            continue  # what does not fit with a small micro batch does not fit with a larger one
        if not is_legal(Workload(model=model, cluster=cluster, job=job, layout=layout)):
            continue
        peak = weigh.peak_gib(layout)
        previous, previous_fits = layout, peak <= usable
        step = weigh.step_time_s(layout) if previous_fits else None
        yield Candidate(layout=layout, peak_gib=peak, step_time_s=step)


def _only_micro_batch_grew(before: Layout, after: Layout) -> bool:
    keys = (
        "engine",
        "tp",
        "pp",
        "vp",
        "first_stage_layers",
        "last_stage_layers",
        "cp",
        "cp_comm_type",
        "sp",
        "ep",
        "etp",
        "zero_stage",
        "zero_hpz",
        "offload_optimizer",
        "offload_param",
        "recompute",
        "chunked_loss",
        "compile_layers",
    )
    # Without accumulation gradients need no second, wider sum: that can be less memory than a smaller micro batch.
    accumulates = (before.gradient_accumulation_steps > 1, after.gradient_accumulation_steps > 1)
    return (
        after.micro_batch_size > before.micro_batch_size
        and accumulates[0] == accumulates[1]
        and all(getattr(before, key) == getattr(after, key) for key in keys)
    )


def _best(considered: tuple[Candidate, ...]) -> Candidate | None:
    fitting = [candidate for candidate in considered if candidate.step_time_s is not None]
    if not fitting:
        return None
    engine = min(engine_simplicity(candidate.layout) for candidate in _close(fitting, ENGINES_ALIKE))
    own = [candidate for candidate in fitting if engine_simplicity(candidate.layout) == engine]
    return min(_close(own, EQUALLY_FAST), key=lambda candidate: simplicity(candidate.layout))


def _close(fitting: list[Candidate], times: float) -> list[Candidate]:
    fastest = min(step_s(candidate) for candidate in fitting)
    return [candidate for candidate in fitting if step_s(candidate) <= times * fastest]


def step_s(candidate: Candidate) -> float:
    """Step time of a candidate that fits."""
    assert candidate.step_time_s is not None
    return candidate.step_time_s

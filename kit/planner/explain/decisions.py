"""Why a plan is as it is: each choice, its reason, and what the alternatives would have cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kit.cost.efficiency import usable_gib
from kit.cost.step_time import StepTimer
from kit.cost.workload import Workload
from kit.planner.describe import describe, engine_words
from kit.planner.explain.alternatives import alternatives, split_of
from kit.planner.explain.compression import compression_remarks
from kit.planner.explain.fp8 import fp8_remarks
from kit.planner.fast_paths import fast_paths
from kit.planner.plan import Decision
from kit.planner.rules import is_legal
from kit.planner.weighing import (
    ENGINES_ALIKE,
    EQUALLY_FAST,
    Candidate,
    Found,
    engine_simplicity,
    illegal,
    step_s,
)
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import ENGINES, Layout, Offload, Pins
from kit.specs.model import ModelSpec
from kit.units import human_seconds

CHOICES = {
    "torch": ("zero_stage", "recompute", "micro_batch_size"),
    "deepspeed": ("zero_stage", "zero_hpz", "offload_optimizer", "offload_param", "recompute", "micro_batch_size"),
    "megatron": ("tp", "cp", "pp", "vp", "sp", "ep", "zero_stage", "recompute", "micro_batch_size"),
}
"""What is decided for each engine, in the order of the report."""

MOST_RIVALS = 4
"""Values of one choice that a decision compares with the chosen one."""


def decisions(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, found: Found) -> tuple[Decision, ...]:
    """The reasons behind ``found.best``."""
    assert found.best is not None
    best = found.best
    made = [_engine(model, cluster, job, pins, found, best)]
    for name in CHOICES[best.layout.engine]:
        decision = _choice(name, model, cluster, job, pins, found, best)
        if decision is not None:
            made.append(decision)
    others = alternatives(model, cluster, job, found.considered, best)
    return (*made, *([others] if others else []), *_remarks(model, cluster, job, best.layout))


def cost_of(candidate: Candidate, cluster: ClusterSpec) -> str:
    """What an alternative would cost: its step, or by how much it does not fit."""
    if candidate.step_time_s is None:
        over = candidate.peak_gib - usable_gib(cluster.gpu)
        return f"needs {candidate.peak_gib:.1f} GiB, {over:.1f} too many"
    return f"{human_seconds(candidate.step_time_s)} a step, {candidate.peak_gib:.1f} GiB"


def _engine(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, found: Found, best: Candidate
) -> Decision:
    chosen = best.layout.engine
    if pins.engine is not None:
        return Decision(rule="engine", chosen=chosen, why="pinned")
    rejected = []
    for engine in ENGINES:
        if engine == chosen:
            continue
        others = [candidate for candidate in found.considered if candidate.layout.engine == engine]
        if others:
            other = _cheapest(others)
            compiled = _compiled(model, cluster, job, pins, other)
            rejected.append(f"{describe(other.layout)}: {cost_of(other, cluster)}{compiled}")
        else:
            broken = illegal(model, cluster, job, pins, (engine,)).get(engine, ())
            rejected += [f"{engine}: {violation}" for violation in broken[:1]]
    return Decision(rule="engine", chosen=chosen, why=_reason(found.considered, best), rejected=tuple(rejected))


def _compiled(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, other: Candidate) -> str:
    """What a layout of the torch engine would take with what is weighed on request alone (``fast_paths``)."""
    layout = other.layout
    if layout.engine != "torch" or layout.tp > 1 or other.step_time_s is None or layout.compile_layers:
        return ""
    ways = fast_paths(model, cluster, job, replace(pins, engine="torch"), compiles=True)
    faster = replace(layout, compile_layers=bool(ways[-1].compile_layers), chunked_loss=bool(ways[-1].chunked_loss))
    if faster == layout or not is_legal(Workload(model=model, cluster=cluster, job=job, layout=faster)):
        return ""
    timer = StepTimer(model, cluster, job)
    now, then = (sum(timer.components_s(each).values()) for each in (layout, faster))
    seconds = human_seconds(other.step_time_s * then / now, like=other.step_time_s)
    return f"; {seconds} with compiled blocks and a loss in chunks, which --engine torch weighs too"


def _choice(
    name: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    pins: Pins,
    found: Found,
    best: Candidate,
) -> Decision | None:
    """One field of the layout against its other values, on the same engine; nothing where there was no choice."""
    chosen = getattr(best.layout, name)
    text = _text(chosen)
    if getattr(pins, name) is not None:
        return Decision(rule=name, chosen=text, why="pinned")
    if name in _ONLY_WITH and getattr(best.layout, _ONLY_WITH[name]) == 1:
        return None  # stages of one pipeline stage, or a sequence split over one rank, are no choice
    same_engine = [candidate for candidate in found.considered if candidate.layout.engine == best.layout.engine]
    values = {getattr(candidate.layout, name) for candidate in same_engine} - {chosen}
    impossible = _impossible(name, values | {chosen}, model, cluster, job, pins, found)
    if not values and not impossible:
        return None
    rivals = sorted(
        (_rival([c for c in same_engine if getattr(c.layout, name) == value], name, best) for value in values),
        key=_rank,
    )
    rejected = tuple(
        f"{_text(getattr(rival.layout, name))}: {cost_of(rival, cluster)}{_besides(name, best.layout, rival.layout)}"
        for rival in rivals[:MOST_RIVALS]
    )
    return Decision(rule=name, chosen=text, why=_why(name, best, rivals), rejected=(*rejected, *impossible))


_ONLY_WITH = {"vp": "pp", "sp": "tp"}

_WITHIN = ("zero_hpz", "offload_param", "vp", "sp", "recompute", "micro_batch_size")
"""Choices that are made within a way to split the work: their other values are those of the same split, if any fits."""


def _rival(candidates: list[Candidate], name: str, best: Candidate) -> Candidate:
    """The layout that stands for a rejected value: the cheapest that has it."""
    if name in _WITHIN:
        own = split_of(best.layout)
        same_split = [c for c in candidates if c.step_time_s is not None and split_of(c.layout) == own]
        candidates = same_split or candidates
    return _cheapest(candidates)


def _besides(name: str, best: Layout, rival: Layout) -> str:
    """What else has to change for it, so that nobody takes the cost for that of the one value."""
    sizes = [size for size in ("tp", "cp", "pp", "vp", "ep", "etp", "zero_stage", "zero_hpz") if size != name]
    parts = [f"{size}={getattr(rival, size)}" for size in sizes if getattr(rival, size) != getattr(best, size)]
    if rival.implementation != best.implementation:
        parts.append(rival.implementation)
    if name != "recompute" and rival.recompute != best.recompute:
        parts.append("no recompute" if rival.recompute == "none" else f"{rival.recompute} recompute")
    for place in ("offload_optimizer", "offload_param"):
        if place != name and getattr(rival, place) != getattr(best, place):
            parts.append(f"{place}={getattr(rival, place)}")
    if name != "micro_batch_size" and rival.micro_batch_size != best.micro_batch_size:
        parts.append(f"micro batch {rival.micro_batch_size}")
    return f" (with {', '.join(parts)})" if parts else ""


def _impossible(
    name: str,
    weighed: set[object],
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    pins: Pins,
    found: Found,
) -> list[str]:
    """Places for offloaded state that were tried and break a rule, such as too little host memory, with the rule."""
    if not name.startswith("offload_") or not found.scope.offload:
        return []
    reasons = []
    places: tuple[Offload, ...] = ("cpu", "nvme")
    asked = replace(pins, engine="deepspeed", zero_stage=pins.zero_stage or 3)
    for place in places:
        if place in weighed:
            continue
        if name == "offload_param":
            asked = replace(asked, offload_param=place)
        else:
            asked = replace(asked, offload_optimizer=place)
        broken = illegal(model, cluster, job, asked, ("deepspeed",)).get("deepspeed", ())
        reasons += [f"{place}: {violation}" for violation in broken[:1]]
    return reasons


def _why(name: str, best: Candidate, rivals: list[Candidate]) -> str:
    fitting = [rival for rival in rivals if rival.step_time_s is not None]
    if not fitting:
        return "the only value that fits"
    behind = step_s(best) / min(step_s(rival) for rival in fitting) - 1
    if behind > 0:
        return f"{_MEANS[name]}; {behind:.1%} behind the fastest, and simpler or smaller"
    return f"{_MEANS[name]}; the fastest that fits"


_MEANS = {
    "zero_stage": "sharded over the data-parallel ranks: 1 optimizer state, 2 gradients too, 3 weights too",
    "zero_hpz": "weights once more over so many ranks, from which all but the first pass of a step gathers",
    "offload_optimizer": "optimizer state on the host or its disks, stepped by its processors",
    "offload_param": "weights on the host or its disks",
    "tp": "every matrix split inside a node",
    "cp": "every sequence split",
    "ep": "experts shared out, and tokens exchanged",
    "pp": "layers split into stages",
    "vp": "stages interleaved: a smaller bubble for more transfers and activations",
    "sp": "norms and residuals split over the tensor-parallel ranks",
    "recompute": "activations kept, or computed again in backward",
    "micro_batch_size": "sequences at once on a rank",
}


def _reason(considered: Iterable[Candidate], best: Candidate) -> str:
    fastest = min((c for c in considered if c.step_time_s is not None), key=step_s)
    behind = step_s(best) / step_s(fastest) - 1
    if behind == 0:
        return "the fastest that fits"
    if engine_simplicity(fastest.layout) == engine_simplicity(best.layout):
        return (
            f"the engine of the fastest layout that fits; this one is {behind:.1%} behind it, within the "
            f"{EQUALLY_FAST - 1:.0%} that predictions do not tell apart, and simpler or smaller"
        )
    return (
        f"the simplest with a layout within {ENGINES_ALIKE - 1:.0%} of the fastest ({behind:.1%} behind "
        f"{engine_words(fastest.layout)})"
    )


def _remarks(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Iterable[Decision]:
    """What is legal and still worth knowing."""
    if job.seq_length > model.max_position_embeddings:
        yield Decision(
            rule="seq_length",
            chosen=str(job.seq_length),
            why=f"longer than the {model.max_position_embeddings} positions that {model.name} was made for: "
            "RoPE computes any length, but trained weights may not follow",
        )
    yield from compression_remarks(model, cluster, job, layout)
    yield from fp8_remarks(model, cluster, job, layout)
    if layout.tp > cluster.gpus_per_node:
        yield Decision(
            rule="tp",
            chosen=str(layout.tp),
            why=f"reaches across nodes of {cluster.gpus_per_node} GPUs: it runs, at the speed of the fabric",
        )


def _cheapest(candidates: list[Candidate]) -> Candidate:
    """The fastest that fits, else the one that misses by least."""
    return min(candidates, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """What fits by its step time, then what does not by its peak."""
    if candidate.step_time_s is None:
        return (True, candidate.peak_gib)
    return (False, candidate.step_time_s)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

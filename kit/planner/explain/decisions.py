"""Explains a plan: each choice, its reason, and the cost of its alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from kit.cost.hardware import runs_rocm, usable_gib
from kit.cost.time.step import StepTimer
from kit.planner.candidates import fast_paths
from kit.planner.explain.notes import fallback, faster_with_fewer, notes
from kit.planner.plan import Alternative, Decision
from kit.planner.request import Request
from kit.planner.rules import is_legal
from kit.planner.search import (
    EQUALLY_FAST,
    MEMORY_MARGIN,
    PRICE_OF_ROOM,
    Candidate,
    LayoutScorer,
    SearchResult,
    eligible,
    faster_than,
    illegal,
    simplicity,
    step_s,
    that_fit,
)
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import DEFAULTS, ENGINES, EngineName, Layout, describe, engine_name
from kit.specs.validation import changed
from kit.units import human_seconds

_CHOICES = {
    "torch": ("ep", "zero_stage", "recompute", "micro_batch_size"),
    "deepspeed": ("zero_stage", "zero_hpz", "offload_optimizer", "offload_param", "recompute", "micro_batch_size"),
    "megatron": ("tp", "cp", "pp", "vp", "sp", "ep", "zero_stage", "recompute", "micro_batch_size"),
}
"""Engine → names of its choices, in the order of the report."""

_MOST_RIVALS = 4
"""Most rejected values of one choice that a decision names."""

_MOST_ALTERNATIVES = 4
_WORTH_NAMING = 0.003
"""Share of a step below which a difference in one component is not named."""


def decisions(request: Request, result: SearchResult) -> tuple[Decision, ...]:
    """The reasons behind ``result.best``."""
    assert result.best is not None
    best = result.best
    choices = (_choice(name, request, result, best) for name in _CHOICES[best.layout.engine])
    return (
        _engine(request, result, best),
        *(choice for choice in choices if choice is not None),
        *_memory_margin(request, result, best),
        *fallback(request, result),
        *_alternatives(request, result, best),
        *faster_with_fewer(request, best),
        *_transformer_engine(request, best),
        *_without_a_pin(request, best),
        *notes(request.workload(best.layout), LayoutScorer(request)),
    )


def _cost_of(candidate: Candidate, cluster: ClusterSpec) -> str:
    """The cost of an alternative: its step time, or how many GiB do not fit."""
    if candidate.step_time_s is None:
        over = candidate.peak_gib - usable_gib(cluster.gpu)
        return f"needs {candidate.peak_gib:.1f} GiB, {over:.1f} too many"
    return f"{human_seconds(candidate.step_time_s)} a step, {candidate.peak_gib:.1f} GiB"


def _engine(request: Request, result: SearchResult, best: Candidate) -> Decision:
    chosen = best.layout.engine
    if request.pins.engine is not None:
        return Decision(rule="engine", chosen=chosen, why="pinned")
    rejected = []
    for engine, other in _best_of_others(request, result, best).items():
        if other is not None:
            behind = "" if other.step_time_s is None else f"{other.step_time_s / step_s(best) - 1:+.1%}, "
            cost = f"{behind}{_cost_of(other, request.cluster)}{_fast_path(request, other)}"
            rejected.append(f"{describe(other.layout)}: {cost}")
        else:
            broken = illegal(request, (engine,)).get(engine, ())
            rejected += [f"{engine}: {violation}" for violation in broken[:1]]
    return Decision(
        rule="engine", chosen=chosen, why=_reason(eligible(result.considered, request), best), rejected=tuple(rejected)
    )


def _best_of_others(request: Request, result: SearchResult, best: Candidate) -> dict[EngineName, Candidate | None]:
    """Each other engine → its best layout, which may not fit; None without a legal one."""
    engines = (engine for engine in ENGINES if engine != best.layout.engine)
    legal = {engine: [each for each in result.considered if each.layout.engine == engine] for engine in engines}
    return {
        engine: min(eligible(layouts, request) or layouts, key=_rank, default=None) for engine, layouts in legal.items()
    }


def alternatives(request: Request, result: SearchResult) -> tuple[Alternative, ...]:
    """Layouts of the engines that ``result.best`` does not use; none where one is pinned."""
    assert result.best is not None
    found = {} if request.pins.engine else _best_of_others(request, result, result.best)
    return tuple(
        Alternative(layout=describe(other.layout), step_time_s=other.step_time_s)
        for other in found.values()
        if other is not None and other.step_time_s is not None
    )


def _fast_path(request: Request, other: Candidate) -> str:
    """Step time or memory of a torch layout on the fast path, if the search tries the fast path only on request."""
    layout = other.layout
    if layout.engine != "torch" or layout.tp > 1 or other.step_time_s is None or layout.compile_layers:
        return ""
    way = fast_paths(replace(request, pins=request.pins.but(engine="torch")), compiles=True)[-1]
    faster = replace(layout, compile_layers=bool(way.compile_layers), chunked_loss=bool(way.chunked_loss))
    if faster == layout or not is_legal(request.workload(faster)):
        return ""
    timer = StepTimer()
    now, then = (sum(timer.components_s(request.workload(each)).values()) for each in (layout, faster))
    seconds = human_seconds(other.step_time_s * then / now, like=other.step_time_s)
    blocks = "compiled blocks and " if faster.compile_layers else ""
    return f"; {seconds} with {blocks}a chunked loss, which --engine torch tries too"


def _choice(name: str, request: Request, result: SearchResult, best: Candidate) -> Decision | None:
    """Compares the chosen value of one layout field with its other values on the same engine; None if there were no
    others."""
    chosen = getattr(best.layout, name)
    text = _text(chosen)
    if getattr(request.pins, name) is not None:
        return Decision(rule=name, chosen=text, why="pinned")
    if name in _ONLY_WITH and getattr(best.layout, _ONLY_WITH[name]) == 1:
        return None  # without a pipeline or without context parallelism this field has no effect
    by_value: dict[Any, list[Candidate]] = {}
    for candidate in result.considered:
        if candidate.layout.engine == best.layout.engine:
            by_value.setdefault(getattr(candidate.layout, name), []).append(candidate)
    values = by_value.keys() - {chosen}
    impossible = _impossible(name, values | {chosen}, request, result)
    if not values and not impossible:
        return None
    rivals = sorted(
        (_rival(by_value[value], name, best) for value in values),
        key=_rank,
    )
    rejected = tuple(
        f"{_text(getattr(rival.layout, name))}: {_cost_of(rival, request.cluster)}"
        f"{_besides(name, best.layout, rival.layout)}"
        for rival in rivals[:_MOST_RIVALS]
    )
    others = [candidate for value in values for candidate in by_value[value]]
    return Decision(rule=name, chosen=text, why=_why(name, best, others), rejected=(*rejected, *impossible))


_ONLY_WITH = {"vp": "pp", "sp": "tp"}

_WITHIN = ("zero_hpz", "offload_param", "vp", "sp", "recompute", "micro_batch_size")
"""Choices within one split of the work: an alternative value is taken from the same split, if any such layout fits."""


def _rival(candidates: list[Candidate], name: str, best: Candidate) -> Candidate:
    """The layout that represents a rejected value: the best layout with this value."""
    if name in _WITHIN:
        own = _split_of(best.layout)
        same_split = [c for c in that_fit(candidates) if _split_of(c.layout) == own]
        candidates = same_split or candidates
    return min(candidates, key=_rank)


def _besides(name: str, best: Layout, rival: Layout) -> str:
    """Other fields in which the rival differs from the best layout, since they contribute to its cost."""
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


def _impossible(name: str, tried: set[object], request: Request, result: SearchResult) -> list[str]:
    """Places for offloaded state that no compared layout uses, each with the message of the rule that refuses it."""
    if not name.startswith("offload_") or not result.further:
        return []
    reasons = []
    pins = request.pins.but(engine="deepspeed", zero_stage=request.pins.zero_stage or 3)
    for place in ("cpu", "nvme"):
        if place not in tried:
            pins = pins.but(**{name: place})
            broken = illegal(replace(request, pins=pins), ("deepspeed",)).get("deepspeed", ())
            reasons += [f"{place}: {violation}" for violation in broken[:1]]
    return reasons


def _why(name: str, best: Candidate, others: list[Candidate]) -> str:
    """``others``: the engine's compared layouts with other values."""
    fitting = that_fit(others)
    if not fitting:
        return "no layout that was compared fits with another value"
    behind = step_s(best) / min(map(step_s, fitting)) - 1
    verdict = f"{behind:.1%} slower than the fastest, but simpler or smaller" if behind > 0 else "the fastest that fits"
    return f"{_meaning(name, best.layout)}; {verdict}"


def _meaning(name: str, layout: Layout) -> str:
    """Explains the chosen value."""
    if name == "zero_stage":
        return _SHARDED[layout.zero_stage]
    off, on = _MEANINGS[name]
    return off if getattr(layout, name) == DEFAULTS[name] else on


_SHARDED = (
    "every rank has all weights, gradients and optimizer state",
    "optimizer state is sharded over the data-parallel ranks",
    "optimizer state and gradients are sharded over the data-parallel ranks",
    "optimizer state, gradients and weights are sharded over the data-parallel ranks",
)
"""What is sharded, by ``zero_stage``."""
_MEANINGS = {
    "zero_hpz": ("weights are sharded once", "weights are sharded a second time inside a node, where backward gathers"),
    "offload_optimizer": ("optimizer state stays on the GPU", "optimizer state is on the host, where the CPU steps it"),
    "offload_param": ("weights stay on the GPU", "weights are on the host or its disks"),
    "tp": ("matrices stay whole", "every matrix is split inside a node"),
    "cp": ("sequences stay whole", "every sequence is split over ranks"),
    "ep": ("every rank has all experts", "experts are spread over ranks, and tokens are sent to them"),
    "pp": ("one stage has all layers", "layers are split into stages"),
    "vp": ("one chunk of layers a stage", "chunks interleave: a smaller bubble for more transfers and activations"),
    "sp": ("every rank has whole norms and residuals", "norms and residuals are split over the tensor-parallel ranks"),
    "recompute": ("activations are saved", "activations are recomputed in backward"),
    "micro_batch_size": ("one sequence at a time on a rank", "sequences at once on a rank"),
}
"""Choice → what its default does, and what another value does."""


def _memory_margin(request: Request, result: SearchResult, best: Candidate) -> Iterator[Decision]:
    """Whether the layout has room for the error of its predicted peak, where the answer had an alternative."""
    usable, fastest = usable_gib(request.cluster.gpu), min(that_fit(result.considered), key=step_s)
    if best.peak_gib > usable / (1 + MEMORY_MARGIN):
        why = (
            f"the peak is {best.peak_gib / usable:.0%} of what is usable, and one of five published peaks was more "
            f"than {MEMORY_MARGIN:.0%} above the prediction; no layout with that room is within "
            f"{PRICE_OF_ROOM - 1:.0%} of the fastest"
        )
        yield Decision(rule="memory_margin", chosen="none", why="--tight was asked for" if request.tight else why)
    elif step_s(best) > EQUALLY_FAST * step_s(fastest) or (
        fastest.peak_gib > usable / (1 + MEMORY_MARGIN) and simplicity(fastest.layout) < simplicity(best.layout)
    ):
        why = (
            f"room for an error that four of five published peaks stay below; this is "
            f"{step_s(best) / step_s(fastest) - 1:.1%} slower than what fills {fastest.peak_gib / usable:.0%} of what "
            "is usable, which --tight takes"
        )
        cost = f"{describe(fastest.layout)}: {_cost_of(fastest, request.cluster)}"
        yield Decision(rule="memory_margin", chosen=f"{MEMORY_MARGIN:.0%}", why=why, rejected=(cost,))


def _reason(among: Iterable[Candidate], best: Candidate) -> str:
    fastest = min(among, key=step_s)
    behind = step_s(best) / step_s(fastest) - 1
    if behind == 0:
        return "the fastest that fits"
    if engine_name(fastest.layout) == engine_name(best.layout):
        return (
            f"the fastest engine; this layout is {behind:.1%} slower than its fastest, but simpler or smaller "
            f"(differences under {EQUALLY_FAST - 1:.0%} are within the model's error)"
        )
    return (
        f"the simplest within {EQUALLY_FAST - 1:.0%} of the fastest ({behind:.1%} slower than "
        f"{engine_name(fastest.layout)})"
    )


def _transformer_engine(request: Request, best: Candidate) -> Iterator[Decision]:
    """The layout that ``cluster.transformer_engine=true`` finds on NVIDIA's GPUs, if it is faster."""
    cluster = request.cluster
    nvidias = cluster.gpu.device == "cuda" and not runs_rocm(cluster.gpu)
    if not nvidias or cluster.transformer_engine or request.pins.engine not in (None, "megatron"):
        return
    asked = replace(
        request, cluster=changed(cluster, transformer_engine=True), pins=request.pins.but(engine="megatron")
    )
    found = faster_than(asked, step_s(best) / EQUALLY_FAST)
    if found is not None and found.layout.implementation == "transformer_engine":
        now, then = step_s(best), step_s(found)
        why = (
            f"with transformer_engine installed: {human_seconds(then, like=now)} a step, {1 - then / now:.1%} less "
            f"({describe(found.layout)}); cluster.transformer_engine=true takes it"
        )
        yield Decision(rule="implementation", chosen=best.layout.implementation, why=why)


def _without_a_pin(request: Request, best: Candidate) -> Iterator[Decision]:
    """Where pins lead to offload: the fastest layout without one of them that needs none, if it is faster. The engine
    stays."""
    pins, quickest, changed_pin = request.pins, best, ""
    if best.layout.offload_optimizer in ("none", pins.offload_optimizer):
        return
    for name in (field.name for field in fields(pins) if field.name not in ("engine", "implementation")):
        if getattr(pins, name) is not None:
            found = faster_than(replace(request, pins=pins.but(**{name: None})), step_s(quickest) / EQUALLY_FAST)
            if found is not None and found.layout.offload_optimizer == "none":
                quickest, changed_pin = found, name
    if quickest is not best:
        now, then = step_s(best), step_s(quickest)
        value, other = (_text(getattr(each.layout, changed_pin)) for each in (best, quickest))
        why = (
            f"with this pin the plan has its optimizer on the host; layout.{changed_pin}={other} needs no offload: "
            f"{human_seconds(then, like=now)} a step, {1 - then / now:.1%} less ({describe(quickest.layout)})"
        )
        yield Decision(rule="pin", chosen=f"{changed_pin}={value}", why=why)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Sort key: fitting layouts by step time, then the others by peak memory."""
    if candidate.step_time_s is None:
        return (True, candidate.peak_gib)
    return (False, candidate.step_time_s)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- other ways to split the work


def _alternatives(request: Request, result: SearchResult, best: Candidate) -> Iterator[Decision]:
    """Fitting layouts with another split of the work, the fastest first."""
    timer = StepTimer()

    def components_s(candidate: Candidate) -> dict[str, float]:
        return _corrected(timer.components_s(request.workload(candidate.layout)), candidate)

    fastest = {_split_of(best.layout): best}
    for candidate in sorted(that_fit(result.considered), key=step_s):
        fastest.setdefault(_split_of(candidate.layout), candidate)
    rejected = tuple(
        f"{describe(other.layout)}: {_difference(best, other, components_s(best), components_s(other))}"
        for other in [*fastest.values()][1 : 1 + _MOST_ALTERNATIVES]
    )
    if rejected:
        why = "the next best ways to split the work"
        yield Decision(rule="next", chosen=describe(best.layout), why=why, rejected=rejected)


def _split_of(layout: Layout) -> tuple[object, ...]:
    """Key of the split: layouts with the same key split the work in the same way."""
    return (layout.engine, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero_stage, layout.offload_optimizer)


def _difference(best: Candidate, other: Candidate, ours: dict[str, float], theirs: dict[str, float]) -> str:
    """``+3.2 %: pipeline bubble +2.1 %, tensor parallel −1.0 %; −4.1 GiB``."""
    step = step_s(best)
    shares = {name: (theirs[name] - ours[name]) / step for name in ours}
    largest = sorted((name for name in shares if abs(shares[name]) >= _WORTH_NAMING), key=lambda n: -abs(shares[n]))[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {shares[name]:+.1%}" for name in largest)
    memory = other.peak_gib - best.peak_gib
    return f"{step_s(other) / step - 1:+.1%} a step" + (f" ({parts})" if parts else "") + f", {memory:+.1f} GiB"


def _corrected(components: dict[str, float], candidate: Candidate) -> dict[str, float]:
    """Applies the calibration, as the candidate's step time does."""
    factor = step_s(candidate) / sum(components.values())
    return {name: factor * seconds for name, seconds in components.items()}

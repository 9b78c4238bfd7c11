"""Compare every layout, and take the fastest legal one that fits.

``candidates`` lists layouts. The search drops those that break a rule (``rules``) or do not fit (``kit.cost``), and
predicts the step time of the rest. Of those with room for the error of the predicted peak (``MEMORY_MARGIN``), it takes
the simplest of the equally fast (``EQUALLY_FAST``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from kit.cost.hardware import usable_gib
from kit.cost.memory.deepspeed_sizes import LIVE_SHARE
from kit.cost.memory.peak import peak_gib
from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.planner.candidates import LowerBound, all_layouts, layouts
from kit.planner.fallbacks import COST_TIME, FALLBACKS, ON_HOST, Fallback
from kit.planner.request import Request
from kit.planner.rules import Violation, is_legal, violations
from kit.specs.layout import ENGINES, EngineName, Layout, Pins, Recompute

EQUALLY_FAST = 1.03
"""Layouts whose step times differ by less than this ratio count as equally fast: the model ranks no finer. In 48 sets
of measured layouts, the layout with the shortest predicted step takes on average 3.1 % longer than the best one; the
simplest layout within 1 % of it takes 3.7 % longer, the simplest within 5 % takes 6.3 % longer (python -m
benchmarks.accuracy throughput, docs/findings.md)."""
MEMORY_MARGIN = 0.08
"""Upper edge of the error of a predicted peak: of 112 published peaks above 4 GiB (43 configurations of equal weight),
80 % are at most this much above the prediction (python -m benchmarks.accuracy memory --data memory_dev.json
memory_2025.json)."""
PRICE_OF_ROOM = 1.10
"""How much longer a step may take so that the layout has this room. A run that meets its limit ends in its first steps
and is started again with less; one that is slower pays for as long as it lasts."""


class Candidate(NamedTuple):
    """A legal layout and what it would cost."""

    layout: Layout
    peak_gib: float
    step_time_s: float | None
    """None if the layout does not fit."""


class SearchResult(NamedTuple):
    """Outcome of a search."""

    best: Candidate | None
    considered: tuple[Candidate, ...]
    """Legal layouts that were compared, fitting or not."""
    further: bool
    """Whether ``considered`` includes the further layouts."""
    fallback: Fallback | None = None
    """What ``best`` needs, where no other layout fits or is as fast; ``considered`` then includes its layouts."""
    without: Candidate | None = None
    """The fastest layout without the last resort, if one fits."""


class LayoutScorer:
    """Peak memory and step time of a request's layouts, corrected by what earlier runs measured."""

    def __init__(self, request: Request) -> None:
        self._request, self._timer = request, StepTimer()

    def peak_gib(self, w: Workload) -> float:
        """Peak memory of the fullest GPU, calibrated."""
        return peak_gib(w) + self._request.calibration.of(w).extra_gib

    def step_time_s(self, w: Workload) -> float:
        """Time of an optimizer step, calibrated."""
        return sum(self._timer.components_s(w).values()) * self._request.calibration.of(w).step_time_factor

    def least_s(self, w: Workload) -> float:
        """Lower bound of ``step_time_s``, which takes a tenth of the time."""
        return self._timer.layers_s(w) * self._request.calibration.of(w).step_time_factor

    def candidate(self, w: Workload, limit_gib: float) -> Candidate:
        """The layout with its peak memory, and its step time unless the peak exceeds the limit."""
        peak = self.peak_gib(w)
        return Candidate(w.layout, peak, self.step_time_s(w) if peak <= limit_gib else None)


class _StepByStep(LayoutScorer):
    """Gives each layout the first of a last resort's steps with which it fits; the last one if it fits with none."""

    def __init__(self, request: Request, steps: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__(request)
        self._steps = [{name: value} for name, values in steps.items() for value in values]

    def candidate(self, w: Workload, limit_gib: float) -> Candidate:
        """The layout with its step. ``w`` has the first one, and is legal; a node may lack the memory for others."""
        *tried, last = (w.with_layout(w.layout.but(**step)) for step in self._steps)
        if (peak := self.peak_gib(last)) > limit_gib:
            return Candidate(last.layout, peak, None)
        chosen = next((each for each in tried if self.peak_gib(each) <= limit_gib), last)
        return super().candidate(chosen, limit_gib if is_legal(chosen) else -math.inf)


def search(request: Request) -> SearchResult:
    """Compares the usual layouts, and those further layouts that need less memory than every usual one; with ZeRO-3, at
    most ``LIVE_SHARE`` of the GPU's memory more. If none fits, those that engines have on request alone; then those of
    the first group of last resorts in which one does. If the fastest one offloads its optimizer, those with Megatron's
    on the host.

    More GPU memory should only add layouts that fit, and never make a plan slower. Other further layouts are left out:
    no measurements support their predictions, and they would take most of the search time.
    """
    found = _without_fallbacks(request, LayoutScorer(request))
    for pinned in _on_request(request) if found.best is None else ():
        more = _without_fallbacks(pinned, LayoutScorer(pinned))
        considered = (*found.considered, *more.considered)
        found = SearchResult(_best(considered, request), considered, further=True)
    for group in _allowed(request) if found.best is None else ():
        fitting = {each: that_fit(layouts_with(each, request)) for each in group}
        among = tuple(itertools.chain.from_iterable(fitting.values()))
        if (best := _best(among, request)) is not None:
            chosen = next(each for each, candidates in fitting.items() if best in candidates)
            return SearchResult(best, (*found.considered, *among), further=True, fallback=chosen)
    return _or_on_host(request, found)


def _on_request(request: Request) -> Iterator[Request]:
    """The request with each engine pinned that has more layouts on request; Megatron has those of one GPU."""
    if request.pins.engine is None:
        for engine in ENGINES:
            if engine != "megatron" or request.cluster.num_gpus == 1:
                yield replace(request, pins=request.pins.but(engine=engine))


def _allowed(request: Request) -> tuple[tuple[Fallback, ...], ...]:
    """The groups of last resorts that the search takes unasked. What costs accuracy is only proposed where the user
    decided more than the engine: one of these pins may be what stands in the way."""
    engine = {"engine": None, "implementation": None}
    return FALLBACKS if request.pins.but(**engine) == Pins() else (COST_TIME,)


def _without_fallbacks(request: Request, scorer: LayoutScorer, most_gib: float = math.inf) -> SearchResult:
    """The search among usual and further layouts. ``most_gib``: see ``layouts``."""
    usable = usable_gib(request.cluster.gpu)
    usual = tuple(_considered(request, scorer, lambda _: usable, most_gib=most_gib))
    least = min((candidate.peak_gib for candidate in usual), default=math.inf)
    # With more GPU memory ZeRO-3 keeps more weights gathered, so its layouts may need that much more.
    live = LIVE_SHARE * request.cluster.gpu.memory_gib

    def limit_gib(layout: Layout) -> float:
        return min(usable, least + (live if layout.zero_stage == 3 else 0.0))

    # A layout that takes longer than the fastest usual one is not chosen; only the reasons for a further one name it.
    most_s = EQUALLY_FAST * min(map(step_s, that_fit(usual)), default=math.inf)
    bound = _slower_than(request, scorer, most_s) if most_s < math.inf else None
    further = [*_considered(request, scorer, limit_gib, True, min(least, most_gib), bound)]
    considered = (*usual, *(that_fit(further) if least <= usable else further))
    best = _best(considered, request)
    if best in usual:
        return SearchResult(best=best, considered=usual, further=False)
    if bound is not None:
        considered = (*usual, *that_fit(_considered(request, scorer, limit_gib, True, least)))
    return SearchResult(best=best, considered=considered, further=True)


def layouts_with(fallback: Fallback, request: Request) -> tuple[Candidate, ...]:
    """Layouts with a last resort, apart from those that need more memory than there is."""
    asked = _asked(fallback, request)
    return _without_fallbacks(*asked, most_gib=usable_gib(request.cluster.gpu)).considered if asked else ()


def _asked(fallback: Fallback, request: Request) -> tuple[Request, LayoutScorer] | None:
    """The request with a last resort, and what scores its layouts; None if the user's pins forbid it."""
    if (asked := fallback.added_to(request)) is None:
        return None
    steps = fallback.open_steps(request)
    return asked, _StepByStep(asked, steps) if steps else LayoutScorer(asked)


def _or_on_host(request: Request, found: SearchResult) -> SearchResult:
    """``found``; or Megatron's optimizer on the host, if several GPUs offload another one unasked and take longer."""
    best, stays = found.best, ("none", request.pins.offload_optimizer)
    if best is None or request.cluster.num_gpus == 1 or best.layout.offload_optimizer in stays:
        return found
    asked = _asked(ON_HOST, request)
    on_host = asked and _faster_than(*asked, step_s(best) / EQUALLY_FAST, usable_gib(request.cluster.gpu))
    if on_host is None:
        return found
    considered, fastest = (*found.considered, *on_host.considered), min(that_fit(found.considered), key=step_s)
    return SearchResult(on_host.best, considered, further=True, fallback=ON_HOST, without=fastest)


def faster_than(request: Request, most_s: float) -> Candidate | None:
    """The best layout if a usual one takes less than ``most_s``; otherwise None, without a whole search."""
    found = _faster_than(request, LayoutScorer(request), most_s)
    return found and found.best


def _faster_than(
    request: Request, scorer: LayoutScorer, most_s: float, most_gib: float = math.inf
) -> SearchResult | None:
    usable, bound = usable_gib(request.cluster.gpu), _slower_than(request, scorer, most_s)
    usual = _considered(request, scorer, lambda _: usable, most_gib=most_gib, bound=bound)
    quick = any(candidate.step_time_s is not None and candidate.step_time_s < most_s for candidate in usual)
    found = _without_fallbacks(request, scorer, most_gib) if quick else None
    return found if found and found.best is not None and step_s(found.best) < most_s else None


def _slower_than(request: Request, scorer: LayoutScorer, most_s: float) -> LowerBound:
    return LowerBound(lambda layout: scorer.least_s(request.workload(layout)) > most_s)


def can_fit(request: Request, among: Iterable[Layout] | None = None, fallbacks: bool = True) -> bool:
    """Whether any layout of the request, or of ``among``, fits; stops at the first. ``fallbacks``: whether they
    count."""
    usable = usable_gib(request.cluster.gpu)
    if among is not None:
        scorer = LayoutScorer(request)
        return any(is_legal(w) and scorer.peak_gib(w) <= usable for w in map(request.workload, among))
    tried = ((each, LayoutScorer(each)) for each in (request, *_on_request(request)))
    resorts = (_asked(each, request) for group in _allowed(request) for each in group if fallbacks)
    return any(
        candidate.step_time_s is not None
        for asked in itertools.chain(tried, filter(None, resorts))
        for further in (False, True)
        for candidate in _considered(*asked, lambda _: usable, further, most_gib=usable)
    )


def illegal(request: Request, engines: tuple[EngineName, ...] | None = None) -> dict[EngineName, tuple[Violation, ...]]:
    """Engines without a legal layout → the violations of the layout with the fewest."""
    reasons: dict[EngineName, tuple[Violation, ...]] = {}
    for engine in engines or _engines(request):
        fewest: tuple[Violation, ...] = ()
        for layout in all_layouts(request, engine):
            broken = violations(request.workload(layout))
            fewest = broken if not fewest or len(broken) < len(fewest) else fewest
            if not broken:
                break
        if fewest:
            reasons[engine] = fewest
    return reasons


def engine_simplicity(layout: Layout) -> int:
    """Smaller is simpler. Least simple are layouts that split the work in two ways at once: DeepSpeed over Megatron's
    layers, and FSDP2 over DTensor's tensor parallelism."""
    both = (layout.engine == "deepspeed" and layout.implementation != "huggingface") or (
        layout.engine == "torch" and layout.tp > 1
    )
    return len(ENGINES) if both else ENGINES.index(layout.engine)


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Smaller is simpler: no offload, plain PyTorch before an engine, fewer kinds of parallelism, less memory
    traffic."""
    return (
        _FARNESS[layout.offload_optimizer] + _FARNESS[layout.offload_param],
        engine_simplicity(layout),
        layout.pp,
        layout.tp * layout.cp,
        int(layout.cp_comm_type == "p2p"),
        layout.ep,
        layout.vp,
        _RECOMPUTES[layout.recompute],
        layout.zero_stage,
        layout.zero_hpz,
        layout.chunked_loss + layout.compile_layers + layout.activation_offloading + layout.tiled_mlp,
        layout.micro_batch_size,
    )


_RECOMPUTES: dict[Recompute, int] = {"none": 0, "selective": 1, "full": 2}
_FARNESS = {"none": 0, "cpu": 1, "nvme": 2}


def _engines(request: Request) -> tuple[EngineName, ...]:
    return ENGINES if request.pins.engine is None else (request.pins.engine,)


def _considered(
    request: Request,
    scorer: LayoutScorer,
    limit_gib: Callable[[Layout], float],
    further: bool = False,
    most_gib: float = math.inf,
    bound: LowerBound | None = None,
) -> Iterator[Candidate]:
    """Legal layouts; ``step_time_s`` is None if the peak exceeds ``limit_gib``. ``most_gib``, ``bound``: see
    ``layouts``."""
    most_gib = math.inf if request.calibration.residuals else most_gib  # calibration may lower the predicted memory
    for engine in _engines(request):
        previous: Layout | None = None
        asked = _with_installed(request, engine)
        for index, layout in enumerate(layouts(asked, engine, further, most_gib, bound)):
            if previous is not None and _needs_no_less(previous, layout):
                continue
            workload = request.workload(layout)
            if not is_legal(workload):
                first = index == 0 and engine == "megatron"
                if first and not _WHATEVER_THE_SIZES.isdisjoint(each.rule for each in violations(workload)):
                    break
                continue
            candidate = scorer.candidate(workload, limit_gib(layout))
            previous = layout if candidate.step_time_s is None else None
            yield candidate


def _with_installed(request: Request, engine: EngineName) -> Request:
    """The request with Transformer Engine's layers on Megatron, where the nodes have it and it has the model's and the
    job's layers."""
    if engine != "megatron" or not request.cluster.transformer_engine or request.pins.implementation is not None:
        return request
    asked = replace(request, pins=request.pins.but(implementation="transformer_engine"))
    broken = (violations(asked.workload(layout)) for layout in itertools.islice(layouts(asked, engine), 1))
    can = all(_WHATEVER_THE_SIZES.isdisjoint(each.rule for each in found) for found in broken)
    return asked if can else request


_WHATEVER_THE_SIZES = frozenset(
    {
        "bf16_state", "bf16_units", "fp8_needs_transformer_engine", "fp8_units", "lora", "megatron_family",
        "megatron_rope", "objective", "objective_of_stacks", "optimizer", "optimizer_on_the_host", "positions",
        "precision", "transformer_engine_family", "transformer_engine_needs_cuda",
    }
)  # fmt: skip
"""Rules that read only model, cluster, job and implementation. All of Megatron's layouts have one implementation: if
the first layout breaks one of these rules, thousands of others break it too."""


def _needs_no_less(before: Layout, after: Layout) -> bool:
    """Whether ``after`` needs at least as much memory as ``before``: a larger micro batch or less of what saves memory,
    and otherwise equal."""
    # Without accumulation there is no fp32 gradient sum, so a larger micro batch may need less memory.
    accumulates = (before.gradient_accumulation_steps > 1, after.gradient_accumulation_steps > 1)
    return (
        after.micro_batch_size >= before.micro_batch_size
        and _RECOMPUTES[after.recompute] <= _RECOMPUTES[before.recompute]
        and after.activation_offloading <= before.activation_offloading
        and after.tiled_mlp <= before.tiled_mlp
        and accumulates[0] == accumulates[1]
        and _the_rest(before) == _the_rest(after)
    )


_the_rest = attrgetter(
    *(
        field.name
        for field in fields(Layout)
        if field.name
        not in ("micro_batch_size", "gradient_accumulation_steps", "recompute", "activation_offloading", "tiled_mlp")
    )
)


def eligible(considered: Iterable[Candidate], request: Request) -> list[Candidate]:
    """The fitting layouts from which speed chooses: those with room for the error of the predicted peak, where one is
    about as fast as the fastest; otherwise all that fit."""
    fitting = that_fit(considered)
    if request.tight or not fitting:
        return fitting
    roomy_gib, most_s = usable_gib(request.cluster.gpu) / (1 + MEMORY_MARGIN), PRICE_OF_ROOM * min(map(step_s, fitting))
    return [each for each in fitting if each.peak_gib <= roomy_gib and step_s(each) <= most_s] or fitting


def _best(considered: tuple[Candidate, ...], request: Request) -> Candidate | None:
    if not (among := eligible(considered, request)):
        return None
    slowest = EQUALLY_FAST * min(map(step_s, among))
    tied = (candidate for candidate in among if step_s(candidate) <= slowest)
    return min(tied, key=lambda candidate: (simplicity(candidate.layout), step_s(candidate)))


def that_fit(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates whose layout fits, which have a step time."""
    return [candidate for candidate in candidates if candidate.step_time_s is not None]


def step_s(candidate: Candidate) -> float:
    """Step time of a candidate that fits."""
    assert candidate.step_time_s is not None
    return candidate.step_time_s

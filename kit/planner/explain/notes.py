"""Notes on legal layouts: sequences longer than in pretraining, slow links, fp8, the gain of compression; why a last
resort was taken, what it costs, what forbids it and what makes it needless; where fewer GPUs would be faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kit.cost.hardware import usable_gib
from kit.cost.time.step import StepTimer
from kit.cost.workload import Workload
from kit.planner.plan import Decision
from kit.planner.request import Request
from kit.planner.rules import is_legal
from kit.planner.search import Candidate, LayoutScorer, SearchResult, faster_than, step_s
from kit.specs.catalog.rows import rows
from kit.specs.layout import Layout, describe
from kit.specs.optimizers import OPTIMIZERS
from kit.units import human_seconds

_WORTH_SAYING = 0.05
"""Smallest share of a step that compression must save for a note."""
_MOST_COMPUTE = 1.2
"""Half the GPUs compute twice as long. If that is more than this share of the whole step, they are not searched: above
1 they are slower, and 0.2 allow for GEMMs that become more efficient."""


def notes(w: Workload, scorer: LayoutScorer) -> Iterator[Decision]:
    """Notes on a chosen layout. ``scorer``: the search's, so that what a note compares was corrected like the plan."""
    if (known := w.model.approximate) is not None:
        bands = rows("approximate")["counted" if known.counted else "estimated"]
        off = ", ".join(f"{name} {most:.1%} ({worst:.1%})" for name, (most, worst) in bands.items())
        counted = "transformers counted its parameters" if known.counted else "its parameters are estimated too"
        yield Decision(
            rule="model",
            chosen="approximate",
            why=f"model type {w.model.model_type} is not described; {counted}. Tried on described families, 80 % of "
            f"them (all) are within: {off}",
        )
    if w.job.seq_length > w.model.max_position_embeddings:
        yield Decision(
            rule="seq_length",
            chosen=str(w.job.seq_length),
            why=f"longer than the {w.model.max_position_embeddings} positions that {w.model.name} was made for: "
            "RoPE computes any length, but trained weights may not follow",
        )
    if oldest := OPTIMIZERS[w.job.optimizer.name].oldest.get(w.layout.engine):
        yield Decision(
            rule="optimizer",
            chosen=w.job.optimizer.name,
            why=f"on engine={w.layout.engine} it needs "
            + ", ".join(f"{name} {version} or newer" for name, version in oldest.items()),
        )
    if w.layout.optimizer_state_dtype == "bf16":
        yield Decision(rule="optimizer_state_dtype", chosen="bf16", why=_lost_in_bf16(w.layout))
    yield from _compression(w, scorer)
    yield from _fp8(w, scorer)
    node = w.cluster.gpus_per_node
    if w.cluster.num_nodes > 1 and node % w.layout.tp:
        inside = max(size for size in range(1, min(w.layout.tp, node) + 1) if node % size == w.layout.tp % size == 0)
        yield Decision(
            rule="tp_across_nodes",
            chosen=str(w.layout.tp),
            why=f"reaches across nodes of {node} GPUs: it runs, at the speed of the fabric; layout.tp={inside} stays "
            "inside a node",
        )


def _lost_in_bf16(layout: Layout) -> str:
    """What rounding takes from state in bf16 (docs/optimizers.md has the curves)."""
    if layout.engine == "megatron":
        gradients = " and gradients" if layout.gradient_dtype == "bf16" else ""
        return f"moments{gradients} are rounded to bf16; master weights are fp32"
    lost = (
        "new weights are rounded up or down at random, so that small updates count in the mean"
        if layout.bf16_stochastic_round
        else "an update below a 256th of a weight may be rounded away, as most are at small learning rates"
    )
    return f"no fp32 master weights: {lost}; moments and sums of gradients are rounded to the nearest"


def _compression(w: Workload, scorer: LayoutScorer) -> Iterator[Decision]:
    """One note with every kind of compressed collective that would save time. The search never chooses these, because
    they are lossy."""
    now = scorer.step_time_s(w)
    gains = []
    for name, layout in _compressed(w.layout):
        other = w.with_layout(layout)
        if is_legal(other) and scorer.peak_gib(other) <= usable_gib(w.cluster.gpu):
            then = scorer.step_time_s(other)
            if then <= (1 - _WORTH_SAYING) * now:
                gains.append(f"{name}: {human_seconds(then)} a step, {1 - then / now:.0%} less")
    if gains:
        yield Decision(
            rule="gradient_compression",
            chosen="none",
            why="compression rounds what is sent, so it is on request only; on these links it would gain",
            rejected=tuple(gains),
        )


def _compressed(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if layout.gradient_compression == "none":
        yield "gradient_compression=bf16", replace(layout, gradient_compression="bf16")
        yield "gradient_compression=powersgd", replace(layout, gradient_compression="powersgd")
    if not (layout.zero_quantized_weights or layout.zero_quantized_gradients):
        weights = replace(layout, zero_quantized_weights=True)
        yield "zero_quantized_weights", weights
        yield "zero_quantized_weights and zero_quantized_gradients", replace(weights, zero_quantized_gradients=True)


def _fp8(w: Workload, scorer: LayoutScorer) -> Iterator[Decision]:
    """Compares with bf16 where torchao converts linear layers to fp8 (kit/engines/kernels/fp8.py)."""
    if w.job.precision != "fp8" or w.layout.engine != "torch":
        return
    if w.cluster.gpu.device == "cpu":
        yield Decision(
            rule="precision",
            chosen="fp8",
            why="emulated, for a CPU has no fp8: operands of linear layers are rounded to 8 bits and multiplied in "
            "fp32; it shows fp8's rounding, and nothing of its speed and memory",
        )
        return
    bf16 = replace(w, job=replace(w.job, precision="bf16"))
    if is_legal(bf16):
        yield Decision(
            rule="precision",
            chosen="fp8",
            why="linear layers of the blocks multiply in 8 bits, with a scale for each tensor; the head, attention, "
            "experts, gathered weights and saved activations stay as in bf16",
            rejected=(f"bf16, the same layout: {human_seconds(scorer.step_time_s(bf16))} a step",),
        )


def fallback(request: Request, result: SearchResult) -> Iterator[Decision]:
    """The last resort of ``result.best``."""
    best, chosen = result.best, result.fallback
    assert best is not None
    if chosen is not None:
        needless = "" if result.without else _needless(request, result)
        yield Decision(
            rule="last_resort",
            chosen=chosen.what,
            why=f"chosen because {_reason(best, result.without)}. {chosen.price}. {_offload(request, best)}"
            f"{chosen.forbidden_by} forbids it{needless}",
        )


def _reason(best: Candidate, other: Candidate | None) -> str:
    if other is None:
        return "no other layout that kit tries fits"
    return (
        f"the fastest other layout takes {human_seconds(step_s(other), like=step_s(best))} ({describe(other.layout)})"
    )


def _offload(request: Request, best: Candidate) -> str:
    components = StepTimer().components_s(request.workload(best.layout))
    seconds = step_s(best) * components["offload"] / sum(components.values())
    return f"Offload takes {human_seconds(seconds)} of {human_seconds(step_s(best))} a step. " if seconds else ""


def _needless(request: Request, result: SearchResult) -> str:
    """The changes of a refusal that would make another layout fit."""
    from kit.planner.explain.infeasible import changes_that_fit  # most plans need no last resort

    ways = changes_that_fit(request, result.considered, fallbacks=False)
    return "".join(f"; it is not needed with {way}" if not index else f", or {way}" for index, way in enumerate(ways))


def faster_with_fewer(request: Request, best: Candidate) -> Iterator[Decision]:
    """One note if fewer GPUs have a shorter step than ``best``."""
    components = StepTimer().components_s(request.workload(best.layout))
    share = components["compute"] / sum(components.values())
    quickest, gpus = best, request.cluster.num_gpus
    for fewer in request.halved():
        if share * request.cluster.num_gpus / fewer.cluster.num_gpus > _MOST_COMPUTE:
            break
        if (found := faster_than(fewer, step_s(quickest))) is not None:
            quickest, gpus = found, fewer.cluster.num_gpus
    if quickest is not best:
        yield Decision(
            rule="num_gpus",
            chosen=str(request.cluster.num_gpus),
            why=f"fewer GPUs do it faster: {gpus} take {human_seconds(step_s(quickest))} a step, "
            f"{request.cluster.num_gpus} take {human_seconds(step_s(best))}; with "
            f"global_batch_size={request.job.global_batch_size} each of them has too little work",
        )

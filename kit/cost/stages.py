"""Layers of a pipeline stage, and micro batches in flight for each of its chunks."""

from __future__ import annotations

from functools import lru_cache

from kit.cost.setup import Shape, TrainingSetup


def chunks(setup: TrainingSetup, stage: int) -> tuple[tuple[int, ...], ...]:
    """Layer numbers of each of a stage's virtual chunks. Chunk c of the model is on stage c mod pp."""
    return _chunks(setup.shape.num_layers, setup.stage_layers, setup.pp, setup.vp, stage)


@lru_cache(maxsize=4096)
def _chunks(
    num_layers: int, given: tuple[tuple[int, ...], ...], pp: int, vp: int, stage: int
) -> tuple[tuple[int, ...], ...]:
    every = given or even_chunks(num_layers, pp * vp)
    return tuple(every[stage + virtual * pp] for virtual in range(vp))


@lru_cache(maxsize=1024)
def even_chunks(num_layers: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """``parts`` runs of layers of one length; where they do not divide, the first are longer by one."""
    sizes = [num_layers // parts + (part < num_layers % parts) for part in range(parts)]
    starts = [sum(sizes[:part]) for part in range(parts)]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def layers_on_stage(setup: TrainingSetup, stage: int) -> tuple[int, ...]:
    """All layer numbers of a stage."""
    return _stage_layers(setup.shape.num_layers, setup.stage_layers, setup.pp, setup.vp, stage)


@lru_cache(maxsize=4096)
def _stage_layers(num_layers: int, given: tuple[tuple[int, ...], ...], pp: int, vp: int, stage: int) -> tuple[int, ...]:
    return tuple(layer for part in _chunks(num_layers, given, pp, vp, stage) for layer in part)


@lru_cache(maxsize=4096)
def kinds(shape: Shape, layers: tuple[int, ...]) -> tuple[int, int]:
    """(dense layers, layers with experts) among ``layers``."""
    experts = sum(shape.expert_layers[layer] for layer in layers) if shape.expert_layers else 0
    return len(layers) - experts, experts


def stage_kinds(setup: TrainingSetup, stage: int) -> tuple[int, int]:
    """(dense layers, layers with experts) of a stage."""
    return _stage_kinds(setup.shape, setup.stage_layers, setup.pp, setup.vp, stage)


@lru_cache(maxsize=4096)
def _stage_kinds(shape: Shape, given: tuple[tuple[int, ...], ...], pp: int, vp: int, stage: int) -> tuple[int, int]:
    return kinds(shape, _stage_layers(shape.num_layers, given, pp, vp, stage))


def chunks_in_flight(setup: TrainingSetup, stage: int) -> tuple[int, ...]:
    """Micro batches of each virtual chunk that are kept when the last forward before a backward has run.

    1F1B: the stage's distance from the end, plus its own (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    Interleaved: 2(p−i−1) + (v−1)p warm-up forwards and one more, which run in groups of p micro batches through the
    chunks in order (megatron-core, pipeline_parallel/schedules.py, get_pp_rank_microbatches, get_schedule_table).
    """
    return in_flight(setup.pp, setup.vp, setup.micro_batches, stage)


@lru_cache(maxsize=4096)
def in_flight(p: int, v: int, m: int, stage: int) -> tuple[int, ...]:
    """``chunks_in_flight`` from sizes: stages, chunks of each, micro batches."""
    if v == 1:
        return (min(m, p - stage),)
    # Groups of p; where that left a group smaller than p, which the schedule refuses, a larger group must be set.
    width = next((size for size in range(p, m + 1) if m % size == 0 or m % size >= p), m)
    forwards = min(m * v, 2 * (p - stage - 1) + (v - 1) * width + 1)
    counts = [0] * v
    for number in range(forwards):
        group, within = divmod(number, width * v)
        size = min(width, m - group * width)
        counts[within // size if size else 0] += 1
    return tuple(counts)

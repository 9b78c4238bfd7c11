"""Which layers each pipeline stage has, for even and uneven splits, and how many micro batches it has in flight.

Each stage has ``vp`` chunks; chunk c of the model is on stage c mod pp (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2). If the first or last stage has fewer layers than the others, the chunk next to the embedding or the loss
is the short one: the first chunk of the first stage, the last chunk of the last.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def stage_layers(model: ModelSpec, layout: Layout, stage: int) -> tuple[int, ...]:
    """Layer numbers of a stage, ascending. The layout must satisfy the rule ``pipeline_divides_layers``."""
    return tuple(layer for chunk in chunk_layers(model.num_layers, layout)[stage :: layout.pp] for layer in chunk)


def chunk_layers(num_layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Layer numbers of every chunk, in model order."""
    return _chunks(num_layers, layout.pp, layout.vp, layout.first_stage_layers, layout.last_stage_layers)


def middle_stage_layers(model: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(layers, stages) without the stages of a stated size: these layers must divide evenly over these stages."""
    ends = [end for end in (layout.first_stage_layers, layout.last_stage_layers) if end is not None]
    return model.num_layers - sum(ends), layout.pp - len(ends)


@lru_cache(maxsize=256)  # a search asks thousands of times for the same few
def _chunks(num_layers: int, pp: int, vp: int, first: int | None, last: int | None) -> tuple[tuple[int, ...], ...]:
    ends = {0: first, pp - 1: last} if pp > 1 else {0: first}
    stated = {stage: layers for stage, layers in ends.items() if layers is not None}
    each = (num_layers - sum(stated.values())) // max(1, pp - len(stated))
    stages = [stated.get(stage, each) for stage in range(pp)]
    # The short chunks of a stage come first, of the last stage last.
    sizes = [
        (layers + (vp - 1 - virtual if stage == pp - 1 else virtual)) // vp
        for virtual in range(vp)
        for stage, layers in enumerate(stages)
    ]
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False))


@lru_cache(maxsize=4096)
def in_flight(p: int, v: int, m: int, stage: int) -> tuple[int, ...]:
    """Micro batches of each virtual chunk of a stage that are in flight when the last forward before a backward has
    run; ``p`` stages of ``v`` chunks, ``m`` micro batches.

    1F1B: the stage's distance from the end, plus its own (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    Interleaved: 2(p−i−1) + (v−1)p warm-up forwards and one more, which run in groups of p micro batches through the
    chunks in order (megatron-core, pipeline_parallel/schedules.py, get_pp_rank_microbatches, get_schedule_table).
    """
    if v == 1:
        return (min(m, p - stage),)
    # Groups of p micro batches. The schedule refuses a last group smaller than p; then the groups must be larger.
    width = next((size for size in range(p, m + 1) if m % size == 0 or m % size >= p), m)
    forwards = min(m * v, 2 * (p - stage - 1) + (v - 1) * width + 1)
    counts = [0] * v
    for number in range(forwards):
        group, within = divmod(number, width * v)
        size = min(width, m - group * width)
        counts[within // size if size else 0] += 1
    return tuple(counts)

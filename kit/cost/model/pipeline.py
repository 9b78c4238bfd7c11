"""Assigns layers to pipeline stages, evenly or not. A stage is split into ``vp`` chunks, and chunk c of the model is on
stage c mod pp (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Where the first or last stage has fewer layers
than the others, its missing ones are those beside the embedding or the loss: the first chunk of the first stage, the
last chunk of the last."""

from __future__ import annotations

from functools import lru_cache

from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def stage_layers(model: ModelSpec, layout: Layout, stage: int) -> tuple[int, ...]:
    """Numbers of a stage's layers, ascending. The layout keeps the rule ``pipeline_divides_layers``."""
    return tuple(layer for chunk in chunk_layers(model.num_layers, layout)[stage :: layout.pp] for layer in chunk)


def chunk_layers(num_layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Layer numbers of every chunk, in the order in which a token meets them."""
    return _chunks(num_layers, layout.pp, layout.vp, layout.first_stage_layers, layout.last_stage_layers)


def distinct_stages(layout: Layout) -> tuple[int, ...]:
    """Stages of which one differs from another: the first, one between, the last."""
    return tuple(sorted({0, min(1, layout.pp - 1), layout.pp - 1}))


def middle_stage_layers(model: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(layers, stages) between uneven ends: what has to be dealt out evenly, and to how many."""
    ends = [end for end in (layout.first_stage_layers, layout.last_stage_layers) if end is not None]
    return model.num_layers - sum(ends), layout.pp - len(ends)


@lru_cache(maxsize=256)  # a search asks thousands of times for the same few
def _chunks(num_layers: int, pp: int, vp: int, first: int | None, last: int | None) -> tuple[tuple[int, ...], ...]:
    ends = (first or 0) + (last or 0)
    others = pp - (first is not None) - (last is not None)
    middle = (num_layers - ends) // max(1, others)
    by_stage = []
    for stage in range(pp):
        size = middle
        if stage == 0 and first is not None:
            size = first
        elif stage == pp - 1 and last is not None:
            size = last
        each, longer = divmod(size, vp)
        sizes = [each + 1] * longer + [each] * (vp - longer)
        by_stage.append(sizes if stage == pp - 1 else sizes[::-1])
    chunks, start = [], 0
    for virtual in range(vp):
        for sizes in by_stage:
            chunks.append(tuple(range(start, start + sizes[virtual])))
            start += sizes[virtual]
    return tuple(chunks)

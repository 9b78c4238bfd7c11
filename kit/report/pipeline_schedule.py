"""Simulates the 1F1B and interleaved pipeline schedules: the start time of every pass on every stage.

A chunk's forward pass takes one time unit and its backward pass two (Narayanan et al. 2021, arXiv 2104.04473, figures 3
and 4). The order of passes on a stage is megatron-core's (pipeline_parallel/schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kit.specs.layout import Layout

BACKWARD = 2
"""Time units of a chunk's backward pass; the forward pass takes one."""


_MOST_STAGES, _MOST_MICRO_BATCHES = 8, 16
"""Largest schedule that is drawn; a larger one is drawn with these sizes."""


class Drawn(NamedTuple):
    """Sizes of the schedule that is drawn of a pipeline."""

    pp: int
    vp: int
    micro_batches: int


def drawn(layout: Layout) -> Drawn:
    """The pipeline's own sizes, as far as they can be read in a picture."""
    stages = min(layout.pp, _MOST_STAGES)
    vp = min(layout.vp, 2)
    batches = min(layout.gradient_accumulation_steps, _MOST_MICRO_BATCHES)
    return Drawn(stages, vp, (batches // stages * stages or batches) if vp > 1 else batches)


@dataclass(frozen=True)
class Pass:
    """One chunk of one micro batch on one stage."""

    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    start: int
    """Start, in units of a chunk's forward pass."""

    @property
    def end(self) -> int:
        """End of the pass."""
        return self.start + (BACKWARD if self.backward else 1)


def simulate(pp: int, vp: int, micro_batches: int) -> tuple[Pass, ...]:
    """Every pass with its start. With ``vp`` > 1, ``micro_batches`` must be a multiple of ``pp``."""
    orders = [list(_order(pp, vp, micro_batches, stage)) for stage in range(pp)]
    # (micro batch, number of its pass) → when that ends. Its passes follow on one another, stage by stage and back.
    done = {(micro_batch, -1): 0 for micro_batch in range(micro_batches)}
    free = [0] * pp
    passes: list[Pass] = []
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                chunk, micro_batch, backward = order[0]
                number = chunk * pp + stage
                number = 2 * pp * vp - 1 - number if backward else number
                if (ready := done.get((micro_batch, number - 1))) is None:
                    break
                order.pop(0)
                found = Pass(stage, chunk, micro_batch, backward, max(ready, free[stage]))
                free[stage] = done[micro_batch, number] = found.end
                passes.append(found)
    return tuple(passes)


def _order(pp: int, vp: int, micro_batches: int, stage: int) -> Iterator[tuple[int, int, bool]]:
    """(chunk, micro batch, backward): warm-up, one forward and one backward in turn, cool-down."""
    total = micro_batches * vp
    warm_up = pp - stage - 1 if vp == 1 else 2 * (pp - stage - 1) + (vp - 1) * pp
    warm_up = min(warm_up, total)
    forwards = [(*_numbered(pp, vp, micro_batches, number), False) for number in range(total)]
    backwards = [(vp - 1 - chunk, micro, True) for chunk, micro, _ in forwards]
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards[: total - warm_up], strict=True):
        yield forward
        yield backward
    yield from backwards[total - warm_up :]


def _numbered(pp: int, vp: int, micro_batches: int, number: int) -> tuple[int, int]:
    """(chunk, micro batch) of a stage's n-th forward: ``pp`` micro batches through a chunk, then through the next."""
    group, within = divmod(number, pp * vp)
    size = min(pp, micro_batches - group * pp)
    return within // size, group * pp + within % size


def timeline(pp: int, vp: int, micro_batches: int, width: int = 100) -> str:
    """One line per stage. Digit: forward of the micro batch with this last digit; letter: backward; dot: idle."""
    passes = simulate(pp, vp, micro_batches)
    end = max(entry.end for entry in passes)
    rows = [["."] * end for _ in range(pp)]
    for entry in passes:
        mark = chr(ord("a") + entry.micro_batch % 10) if entry.backward else str(entry.micro_batch % 10)
        for unit in range(entry.start, entry.end):
            rows[entry.stage][unit] = mark
    cut = " …" if end > width else ""
    return "\n".join(f"  stage {stage:<3}" + "".join(row[:width]) + cut for stage, row in enumerate(rows))

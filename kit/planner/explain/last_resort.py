"""What a last resort costs, what forbids it, and what makes it needless."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kit.cost.time.step import StepTimer
from kit.planner.describe import describe
from kit.planner.explain.infeasible import MOST_CHANGES, changes_that_fit
from kit.planner.last_resorts import LastResort
from kit.planner.plan import Decision
from kit.planner.request import Request
from kit.planner.search import Candidate, SearchResult, faster_on_request, step_s
from kit.units import human_seconds

_WORTH_SAYING = 0.05
"""Smallest share of a step that a last resort on request must save for a note."""


def last_resort(request: Request, result: SearchResult) -> Iterator[Decision]:
    """The last resort of ``result.best``; or, where a usual offload was found, one that would be faster."""
    best, chosen = result.best, result.last_resort
    assert best is not None
    if chosen is not None:
        yield Decision(
            rule="last_resort",
            chosen=chosen.what,
            why=f"chosen because no other layout that kit tries fits. {chosen.price}. {_offload(request, best)}"
            f"{chosen.forbidden_by} forbids it{_needless(request, result)}",
        )
    elif (other := _worth_saying(request, best)) is not None:
        resort, faster = other
        took, takes = human_seconds(step_s(best)), human_seconds(step_s(faster), like=step_s(best))
        yield Decision(
            rule="last_resort",
            chosen="none",
            why=f"{resort.what} would take {takes} a step instead of {took} ({describe(faster.layout)}, "
            f"{faster.peak_gib:.1f} GiB). {resort.price}, so it is on request: {resort.asked_for_by(faster.layout)}",
        )


def _worth_saying(request: Request, best: Candidate) -> tuple[LastResort, Candidate] | None:
    """A faster last resort on several GPUs whose plan offloads its optimizer anyway."""
    if best.layout.offload_optimizer == "none" or request.cluster.num_gpus == 1:
        return None
    return faster_on_request(request, (1 - _WORTH_SAYING) * step_s(best))


def _offload(request: Request, best: Candidate) -> str:
    seconds = StepTimer().components_s(request.workload(best.layout))["offload"]
    return f"Offload takes {human_seconds(seconds)} of {human_seconds(step_s(best))} a step. " if seconds else ""


def _needless(request: Request, result: SearchResult) -> str:
    """The changes of a refusal that would make another layout fit."""
    ways = itertools.islice(changes_that_fit(request, result.considered, last_resorts=False), MOST_CHANGES)
    return "".join(f"; it is not needed with {way}" if not index else f", or {way}" for index, way in enumerate(ways))

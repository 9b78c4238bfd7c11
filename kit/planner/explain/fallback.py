"""Why a last resort was taken, what it costs, what forbids it, and what makes it needless."""

from __future__ import annotations

from collections.abc import Iterator

from kit.cost.time.step import StepTimer
from kit.planner.describe import describe
from kit.planner.explain.infeasible import changes_that_fit
from kit.planner.plan import Decision
from kit.planner.request import Request
from kit.planner.search import Candidate, SearchResult, step_s
from kit.units import human_seconds


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
    seconds = StepTimer().components_s(request.workload(best.layout))["offload"]
    return f"Offload takes {human_seconds(seconds)} of {human_seconds(step_s(best))} a step. " if seconds else ""


def _needless(request: Request, result: SearchResult) -> str:
    """The changes of a refusal that would make another layout fit."""
    ways = changes_that_fit(request, result.considered, fallbacks=False)
    return "".join(f"; it is not needed with {way}" if not index else f", or {way}" for index, way in enumerate(ways))

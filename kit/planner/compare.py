"""All layouts that the search compared, each with memory and step time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kit.cost.hardware import usable_gib
from kit.errors import PlanError
from kit.planner.make_plan import plan_of
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import LayoutScorer, search
from kit.specs.layout import Layout, describe


class ComparedLayout(NamedTuple):
    """A legal layout. Its step time is predicted even if it does not fit."""

    name: str
    """``describe(layout)``; no two layouts of a comparison share it."""
    layout: Layout
    peak_gib: float
    step_time_s: float
    fits: bool


@dataclass(frozen=True)
class Comparison:
    """The compared layouts of a request, and its plan."""

    request: Request
    layouts: tuple[ComparedLayout, ...]
    plan: Plan | None
    """None if no layout is legal or none fits."""
    refused: str = ""
    """The reason if there is no plan; else empty."""


def compare(request: Request) -> Comparison:
    """Searches, and predicts memory and step time of every legal layout."""
    result, scorer, usable = search(request), LayoutScorer(request), usable_gib(request.cluster.gpu)
    layouts = tuple(
        ComparedLayout(
            describe(each.layout),
            each.layout,
            each.peak_gib,
            each.step_time_s or scorer.step_time_s(request.workload(each.layout)),
            each.peak_gib <= usable,
        )
        for each in result.considered
    )
    try:
        return Comparison(request, layouts, plan_of(request, result))
    except PlanError as refused:
        return Comparison(request, layouts, None, str(refused))

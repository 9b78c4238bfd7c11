"""All layouts that the search compared, each with memory and step time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from kit.cost.hardware import usable_gib
from kit.errors import PlanError
from kit.planner.describe import describe
from kit.planner.make_plan import plan_of, request_for
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import LayoutScorer, search
from kit.planner.sweep import fastest_plan
from kit.specs.layout import Layout, Pins
from kit.specs.text import shown


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

    def pareto_front(self) -> tuple[ComparedLayout, ...]:
        """Fitting layouts for which no other one is better in both step time and memory; the fastest first."""
        front: list[ComparedLayout] = []
        for each in sorted((each for each in self.layouts if each.fits), key=lambda e: (e.step_time_s, e.peak_gib)):
            if not front or each.peak_gib < front[-1].peak_gib:
                front.append(each)
        return tuple(front)

    def plan_with(self, name: str) -> Plan:
        """The plan with the named layout pinned. Raises ``PlanError`` if the name is unknown or the layout does not
        fit."""
        layout = next((each.layout for each in self.layouts if each.name == name), None)
        if layout is None:
            number = len(self.layouts)
            raise PlanError(f"{shown(name)} is not among the {number} layouts that were compared; pin another")
        pins = Pins(**{field.name: getattr(layout, field.name) for field in fields(Pins)})
        return fastest_plan(replace(self.request, pins=pins))


def compare(asked: Request) -> Comparison:
    """Searches, and predicts memory and step time of every legal layout."""
    request = request_for(asked.model, asked.cluster, asked.job, asked.pins, asked.calibration)
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

"""Content of the page: comparison, plan, and the rows of charts and tables. All numbers are from ``kit.api``."""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from kit import api
from kit.emit.run_directory import files_of
from kit.errors import PlanError, SpecError
from kit.planner.compare import ComparedLayout, Comparison
from kit.planner.fallbacks import without_loss
from kit.planner.make_plan import fastest_plan, plan_that_ends
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.sweep import Variant, sweep
from kit.report.html import page
from kit.report.pipeline_schedule import Pass, simulate
from kit.report.view import PlanView, of_a_billion, usd_per_hour, view_of
from kit.report.what_if import compared
from kit.specs.catalog import cluster_called
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import Pins
from kit.specs.recipe import Recipe
from kit.specs.text import shown
from kit.specs.validation import changed

MOST_GPUS = 16384
_SIZES = (1 / 4, 1 / 2, 1, 2, 4)
"""Cluster sizes for which days and cost are compared, relative to the requested cluster."""


class ClusterCost(NamedTuple):
    """A point in the chart of days and cost, both including checkpoints and failures."""

    num_gpus: int
    days: float
    cost_usd: float | None


@dataclass(frozen=True)
class Answer:
    """Content of the page; ``refused`` has the reason if there is no plan."""

    recipe: Recipe
    comparison: Comparison
    plan: Plan | None
    refused: str = ""

    @cached_property
    def view(self) -> PlanView | None:
        """What there is to say of the plan."""
        return None if self.plan is None else view_of(self.plan)

    @cached_property
    def files(self) -> dict[str, str]:
        """Name → text of the files that ``kit emit`` writes, without run.yaml, which needs data."""
        return {} if self.plan is None else files_of(self.plan)

    def report(self) -> str:
        """The page that ``kit plan --html`` writes. Raises ``PlanError`` without a plan."""
        if self.view is None:
            raise PlanError(self.refused)
        return page(self.view)

    def archive(self) -> bytes:
        """All files as a zip."""
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in self.files.items():
                archive.writestr(name, text)
        return stream.getvalue()

    def step(self) -> dict[str, float]:
        """Seconds of a step by component, the longest first."""
        return dict(sorted(self.view.step_s.items(), key=lambda item: -item[1])) if self.view else {}

    def schedule(self) -> tuple[Pass, ...]:
        """Passes of the drawn pipeline schedule; empty without a pipeline."""
        return simulate(*self.view.drawn) if self.view and self.view.drawn else ()

    def changed_since(self, before: Plan | None) -> list[dict[str, str]]:
        """Rows of quantities that changed since the plan ``before``; empty if none did."""
        if before is None or self.plan is None or before.digest == self.plan.digest:
            return []
        return [
            {"what": name, "before": show(old), "now": show(new), "change": f"{new / old - 1:+.1%}"}
            for name, old, new, show in compared(before, self.plan)
        ]

    def cluster_sizes(self) -> list[ClusterSpec]:
        """A quarter, half, twice and four times the cluster: other numbers of its nodes, or of GPUs in one."""
        cluster = self.recipe.cluster
        numbers = [round(cluster.num_gpus * part) for part in _SIZES]
        if catalog_cluster(cluster_text(self.recipe)) == cluster:
            found = [catalog_cluster(f"{number}x{cluster.gpu.name}") for number in numbers]
        else:
            most = MOST_GPUS if cluster.inter_node_gbytes_per_s else 1
            cut = [divmod(number, cluster.gpus_per_node) for number in numbers]
            found = [changed(cluster, num_nodes=nodes) for nodes, rest in cut if not rest and 1 <= nodes <= most]
        return [each for each in dict.fromkeys(found) if each is not None and each.num_gpus <= MOST_GPUS]


@lru_cache(maxsize=256)
def answer(recipe: Recipe, pin: str = "") -> Answer:
    """The answer for a recipe; without a plan it has the reason. Raises ``SpecError``."""
    comparison = _compared(recipe)
    try:
        plan = plan_with(comparison, pin) if pin else comparison.plan
    except PlanError as refused:
        return Answer(recipe, comparison, None, str(refused))
    return Answer(recipe, comparison, plan, comparison.refused)


def pareto_front(layouts: Iterable[ComparedLayout]) -> tuple[ComparedLayout, ...]:
    """Fitting layouts for which no other one is better in both step time and memory; the fastest first."""
    front: list[ComparedLayout] = []
    for each in sorted((each for each in layouts if each.fits), key=lambda e: (e.step_time_s, e.peak_gib)):
        if not front or each.peak_gib < front[-1].peak_gib:
            front.append(each)
    return tuple(front)


def plan_with(comparison: Comparison, name: str) -> Plan:
    """The plan with the named layout pinned. Raises ``PlanError`` if the name is unknown or the layout does not fit."""
    layout = next((each.layout for each in comparison.layouts if each.name == name), None)
    if layout is None:
        number = len(comparison.layouts)
        raise PlanError(f"{shown(name)} is not among the {number} layouts that were compared; pin another")
    pins = Pins(**{field.name: getattr(layout, field.name) for field in fields(Pins)})
    return fastest_plan(replace(comparison.request, pins=pins))


@lru_cache(maxsize=64)
def _compared(recipe: Recipe) -> Comparison:
    """The comparison without the page's pin, which changes only the plan."""
    return api.compare(recipe)


@lru_cache(maxsize=1024)
def cluster_cost(recipe: Recipe, cluster: ClusterSpec) -> ClusterCost | None:
    """Days and cost of the best layout on a cluster; None if none fits, or failures leave no time for it. On another
    cluster than the recipe's, layouts count that lose no accuracy."""
    pins = recipe.layout if cluster == recipe.cluster else without_loss(recipe.layout)
    request = Request(model=recipe.model, cluster=cluster, job=of_a_billion(recipe.job), pins=pins)
    found = next(sweep([Variant("", request)], lambda each: plan_that_ends(each.request))).found
    if found is None or (days := found.predicted.total_days) is None:
        return None
    hourly = usd_per_hour(cluster)
    return ClusterCost(cluster.num_gpus, days, None if hourly is None else hourly * 24 * days)


def cluster_text(recipe: Recipe) -> str:
    """The cluster in the form that the page's field accepts."""
    return f"{recipe.cluster.num_gpus}x{recipe.cluster.gpu.name}"


def with_gpus(cluster: str, number: int) -> str | None:
    """The cluster with about so many GPUs: ``8xH100`` and 16 → ``16xH100``, ``aws:p5.48xlarge:4`` and 16 →
    ``aws:p5.48xlarge:2``. None where the catalog has no such cluster."""
    gpus = re.fullmatch(r"(?:\d+x)?\d+x(.+)", cluster.strip(), flags=re.IGNORECASE)
    node = catalog_cluster(cluster)
    name = re.sub(r":\d+$", "", cluster.strip())
    text = f"{number}x{gpus[1]}" if gpus else f"{name}:{max(1, number // node.gpus_per_node)}" if node else ""
    return text if catalog_cluster(text) else None


def catalog_cluster(text: str) -> ClusterSpec | None:
    """A cluster of the catalog, or None."""
    with contextlib.suppress(SpecError):
        return cluster_called(text)
    return None

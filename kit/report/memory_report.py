"""Memory report: memory of the chosen layout, or of the layout closest to fitting, a verdict, and changes that help."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import TypedDict

from kit.cost.memory.peak import MemoryReport, Verdict, peak
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner.explain.infeasible import changes_that_fit, nearest_miss, nothing_legal
from kit.planner.explain.notes import fallback
from kit.planner.request import Request
from kit.planner.search import search
from kit.report.memory_reasons import memory_reasons
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import describe
from kit.specs.model import ModelSpec


class MemoryJson(TypedDict):
    """A report as ``kit memory --json`` prints it."""

    model: str
    model_source: str
    gpus: int
    gpu: str
    layout: str
    verdict: Verdict
    peak_gib: float
    usable_gib: float
    memory_gib: float
    binding: str
    changes: list[str]
    reasons: list[str]
    host_ram_gib_per_node: float
    host_load_gib_per_node: float
    host_ram_gib_there: float | None
    nvme_gib_per_node: float
    nvme_gib_there: float | None
    stages: list[dict[str, float]]
    """One row per pipeline stage: its number, and GiB by component."""
    phases: list[dict[str, float]]
    """One row per pipeline stage: its number, and the peak of every phase in GiB."""


@dataclass(frozen=True, kw_only=True)
class FitReport(MemoryReport):
    """Memory of a layout, its model and cluster, and changes that help if it does not fit."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    changes: tuple[str, ...] = ()
    """Smallest changes that make the layout fit; empty if it fits."""
    reasons: tuple[str, ...] = ()
    """Sentences that explain the figures."""

    def as_json(self) -> MemoryJson:
        """JSON-able values."""
        return {
            "model": self.model.name,
            "model_source": self.model.source,
            "gpus": self.cluster.num_gpus,
            "gpu": self.cluster.gpu.name,
            "layout": describe(self.layout),
            "verdict": self.verdict,
            "peak_gib": self.peak_gib,
            "usable_gib": self.usable_gib,
            "memory_gib": self.memory_gib,
            "binding": self.binding,
            "changes": list(self.changes),
            "reasons": list(self.reasons),
            "host_ram_gib_per_node": self.host_ram_gib_per_node,
            "host_load_gib_per_node": self.host_load_gib_per_node,
            "host_ram_gib_there": self.cluster.host_ram_gib,
            "nvme_gib_per_node": self.nvme_gib_per_node,
            "nvme_gib_there": self.cluster.nvme_gib,
            "stages": [{"stage": stage.stage, **stage.components_gib} for stage in self.stages],
            "phases": [{"stage": stage.stage, **stage.phases_gib} for stage in self.stages],
        }


def memory_report(request: Request) -> FitReport:
    """Reports the layout that a plan would take. If none fits, reports the layout that exceeds the memory by the least.

    Raises ``PlanError`` with every broken rule if no layout is legal, apart from the rules of the node's capacity.
    """
    result = search(request)
    if result.best:
        found = report_of(request.workload(result.best.layout))
        said = tuple(f"{decision.chosen}: {decision.why}" for decision in fallback(request, result))
        return replace(found, reasons=(*said, *found.reasons)) if result.fallback else found
    nearest = nearest_miss(request, result.considered)
    if nearest is None:
        raise PlanError(nothing_legal(request))
    return report_of(request.workload(nearest), changes_that_fit(request, result.considered))


def report_of(w: Workload, changes: tuple[str, ...] = ()) -> FitReport:
    """Reports one layout, which must be legal, apart from the rules of the node's capacity."""
    memory = peak(w)
    return FitReport(
        **vars(memory), model=w.model, cluster=w.cluster, job=w.job, changes=changes, reasons=memory_reasons(w, memory)
    )

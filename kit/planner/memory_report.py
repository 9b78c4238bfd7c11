"""Does it fit: memory of the chosen layout, or of the nearest miss, with a verdict and ways out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from kit.cost.efficiency import usable_gib
from kit.cost.memory import MemoryReport, peak, peak_gib
from kit.cost.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.errors import PlanError
from kit.planner.candidates import ENGINES, layouts
from kit.planner.describe import describe
from kit.planner.failure import MOST_CHANGES, changes_that_fit, nothing_legal
from kit.planner.rules import violations
from kit.planner.weighing import LAST_RESORTS, search
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec

OF_THE_NODE = {"host_ram", "nvme"}
"""Rules that say that a node has too little of something."""


@dataclass(frozen=True, kw_only=True)
class FitReport(MemoryReport):
    """What a layout needs, whom for, and ways out where it does not fit."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    changes: tuple[str, ...] = ()
    """Smallest changes that make it fit; empty where it does."""

    def as_json(self) -> dict[str, Any]:
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
            "host_ram_gib_per_node": self.host_ram_gib_per_node,
            "host_load_gib_per_node": self.host_load_gib_per_node,
            "host_ram_gib_there": self.cluster.host_ram_gib,
            "nvme_gib_per_node": self.nvme_gib_per_node,
            "nvme_gib_there": self.cluster.nvme_gib,
            "stages": [{"stage": stage.stage, **stage.components_gib} for stage in self.stages],
            "phases": [{"stage": stage.stage, **stage.phases_gib} for stage in self.stages],
        }


def memory_report(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> FitReport:
    """Of the layout that a plan would take, else of the one that misses by least: on the GPU, or on its node.

    Raises ``PlanError`` with every broken rule where no layout is legal but for what the node lacks.
    """
    found = search(model, cluster, job, pins)
    if found.best:
        return report_of(model, cluster, job, found.best.layout)
    legal = [candidate.layout for candidate in found.considered]
    misses = [*legal, *_short_of_a_node(model, cluster, job, pins)]
    if not misses:
        raise PlanError(nothing_legal(model, cluster, job, pins))
    nearest = min(misses, key=lambda layout: _overshoot(model, cluster, job, layout))
    ways = tuple(itertools.islice(changes_that_fit(model, cluster, job, pins), MOST_CHANGES))
    return report_of(model, cluster, job, nearest, ways)


def report_of(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout, changes: tuple[str, ...] = ()
) -> FitReport:
    """Of one layout, legal or short of something on its node."""
    memory = peak(model, cluster, job, layout)
    return FitReport(**vars(memory), model=model, cluster=cluster, job=job, changes=changes)


def _short_of_a_node(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> list[Layout]:
    """Layouts that break no rule but those of host memory and disks."""
    return [
        layout
        for engine in (ENGINES if pins.engine is None else (pins.engine,))
        for layout in layouts(model, cluster, job, pins, engine, LAST_RESORTS)
        if {violation.rule for violation in violations(model, cluster, job, layout)} <= OF_THE_NODE
    ]


def _overshoot(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> tuple[int, list[float]]:
    """How many things there is too little of, and needed over there, the worst first; what a node does not say counts
    as half of what is needed."""
    shares = [peak_gib(model, cluster, job, layout) / usable_gib(cluster.gpu)]
    for needed, there in (
        (host_ram_gib_per_node(model, cluster, layout, job.precision), cluster.host_ram_gib),
        (nvme_gib_per_node(model, cluster, layout, job.precision), cluster.nvme_gib),
    ):
        if needed:
            shares.append(needed / there if there else 2.0)
    return sum(share > 1 for share in shares), sorted(shares, reverse=True)

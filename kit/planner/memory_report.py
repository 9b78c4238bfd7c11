"""Does it fit: memory of the chosen layout, or of the nearest miss, with a verdict and ways out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from kit.cost.efficiency import usable_gib
from kit.cost.memory import peak_gib, peak_memory
from kit.cost.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.prediction import StageMemory
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

TIGHT = 0.95
"""Share of the usable memory above which a fit is called tight: predictions are not better than that."""
OF_THE_NODE = {"host_ram": "host memory", "nvme": "NVMe"}
"""Rules that say that a node has too little of something, and of what."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Peak memory of one GPU of every pipeline stage, and of a node's host and disks. GiB."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout
    stages: tuple[StageMemory, ...]
    host_ram_gib_per_node: float
    nvme_gib_per_node: float
    usable_gib: float
    memory_gib: float
    verdict: Verdict
    binding: str
    """What there is too little of first: the largest component of the fullest stage, host memory, or NVMe."""
    changes: tuple[str, ...] = ()
    """Smallest changes that make it fit; empty where it does."""

    @property
    def peak_gib(self) -> float:
        """Of the fullest stage."""
        return max(stage.peak_gib for stage in self.stages)

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
            "host_ram_gib_there": self.cluster.host_ram_gib,
            "nvme_gib_per_node": self.nvme_gib_per_node,
            "nvme_gib_there": self.cluster.nvme_gib,
            "stages": [{"stage": stage.stage, **stage.components_gib} for stage in self.stages],
        }


def memory_report(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> MemoryReport:
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
) -> MemoryReport:
    """Of one layout, legal or short of something on its node."""
    stages = peak_memory(model, cluster, job, layout)
    fullest = max(stages, key=lambda stage: stage.peak_gib)
    usable = usable_gib(cluster.gpu)
    lacking = [
        OF_THE_NODE[broken.rule] for broken in violations(model, cluster, job, layout) if broken.rule in OF_THE_NODE
    ]
    verdict: Verdict = "fits" if fullest.peak_gib <= TIGHT * usable else "tight"
    if lacking or fullest.peak_gib > usable:
        verdict = "does not fit"
    binding = max(fullest.components_gib, key=lambda name: fullest.components_gib[name])
    return MemoryReport(
        model=model,
        cluster=cluster,
        job=job,
        layout=layout,
        stages=stages,
        host_ram_gib_per_node=host_ram_gib_per_node(model, cluster, layout, job.precision),
        nvme_gib_per_node=nvme_gib_per_node(model, cluster, layout, job.precision),
        usable_gib=usable,
        memory_gib=cluster.gpu.memory_gib,
        verdict=verdict,
        binding=lacking[0] if lacking and fullest.peak_gib <= usable else binding,
        changes=changes,
    )


def _short_of_a_node(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> list[Layout]:
    """Layouts that break no rule but those of host memory and disks."""
    return [
        layout
        for engine in (ENGINES if pins.engine is None else (pins.engine,))
        for layout in layouts(model, cluster, job, pins, engine, LAST_RESORTS)
        if {violation.rule for violation in violations(model, cluster, job, layout)} - OF_THE_NODE.keys() == set()
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

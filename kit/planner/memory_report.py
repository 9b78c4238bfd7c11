"""Does it fit: memory of the chosen layout, or of the nearest miss, with a verdict and ways out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from kit.cost.efficiency import usable_gib
from kit.cost.memory import COMPONENTS, peak_memory
from kit.cost.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.prediction import StageMemory
from kit.errors import PlanError
from kit.planner.describe import describe
from kit.planner.failure import MOST_CHANGES, changes_that_fit, nothing_legal
from kit.planner.weighing import search
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec

TIGHT = 0.95
"""Share of the usable memory above which a fit is called tight: predictions are not better than that."""
BAR = 40
"""Columns of a full GPU."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Peak memory of one GPU of every pipeline stage, GiB."""

    layout: Layout
    stages: tuple[StageMemory, ...]
    host_ram_gib_per_node: float
    nvme_gib_per_node: float
    usable_gib: float
    memory_gib: float
    verdict: Verdict
    binding: str
    """The largest component of the fullest stage."""
    changes: tuple[str, ...]
    """Smallest changes that make it fit; empty where it does."""

    @property
    def peak_gib(self) -> float:
        """Of the fullest stage."""
        return max(stage.peak_gib for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {
            "layout": describe(self.layout),
            "verdict": self.verdict,
            "peak_gib": self.peak_gib,
            "usable_gib": self.usable_gib,
            "memory_gib": self.memory_gib,
            "binding": self.binding,
            "changes": list(self.changes),
            "host_ram_gib_per_node": self.host_ram_gib_per_node,
            "nvme_gib_per_node": self.nvme_gib_per_node,
            "stages": [{"stage": stage.stage, **stage.components_gib} for stage in self.stages],
        }


def memory_report(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> MemoryReport:
    """Of the layout that a plan would take, or of the legal one that misses by least.

    Raises ``PlanError`` with every broken rule where no layout is legal.
    """
    found = search(model, cluster, job, pins)
    if not found.considered:
        raise PlanError(nothing_legal(model, cluster, job, pins))
    chosen = found.best or min(found.considered, key=lambda candidate: candidate.peak_gib)
    stages = peak_memory(model, cluster, job, chosen.layout)
    fullest = max(stages, key=lambda stage: stage.peak_gib)
    usable = usable_gib(cluster.gpu)
    fits: Verdict = "fits" if fullest.peak_gib <= TIGHT * usable else "tight"
    ways = () if found.best else tuple(itertools.islice(changes_that_fit(model, cluster, job, pins), MOST_CHANGES))
    return MemoryReport(
        layout=chosen.layout,
        stages=stages,
        host_ram_gib_per_node=host_ram_gib_per_node(model, cluster, chosen.layout, job.precision),
        nvme_gib_per_node=nvme_gib_per_node(model, cluster, chosen.layout, job.precision),
        usable_gib=usable,
        memory_gib=cluster.gpu.memory_gib,
        verdict=fits if found.best else "does not fit",
        binding=max(fullest.components_gib, key=lambda name: fullest.components_gib[name]),
        changes=ways,
    )


def render_memory(report: MemoryReport) -> str:
    """A table by stage and component, with a bar a stage; plain text."""
    shown = [name for name in COMPONENTS if any(stage.components_gib[name] >= 0.05 for stage in report.stages)]
    lines = [
        f"{report.verdict}: {report.peak_gib:.1f} of {report.usable_gib:.1f} GiB usable "
        f"({report.memory_gib:.1f} in all), most of it {report.binding}",
        f"  {describe(report.layout)}",
        "",
        "  stage " + "".join(f"{name:>12}" for name in [*shown, "peak"]),
    ]
    for stage in report.stages:
        values = [stage.components_gib[name] for name in shown] + [stage.peak_gib]
        filled = round(BAR * min(stage.peak_gib / report.memory_gib, 1.0))
        bar = "#" * filled + "." * (BAR - filled)
        lines.append(f"  {stage.stage:<6}" + "".join(f"{value:>12.1f}" for value in values) + f"  {bar}")
    if report.host_ram_gib_per_node:
        lines.append(f"  host memory of a node: {report.host_ram_gib_per_node:.0f} GiB")
    if report.nvme_gib_per_node:
        lines.append(f"  NVMe of a node: {report.nvme_gib_per_node:.0f} GiB")
    lines += [f"it fits with {change}" for change in report.changes]
    return "\n".join(lines)

"""What misses by least where nothing fits: on a GPU, or in the host memory and on the disks of its node."""

from __future__ import annotations

from collections.abc import Iterable

from kit.cost.efficiency import usable_gib
from kit.cost.memory import peak_gib
from kit.cost.offload import HOST_SHARE, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.workload import Workload
from kit.planner.candidates import layouts
from kit.planner.rules import violations
from kit.planner.rules.deepspeed import NODE_CAPACITY
from kit.planner.weighing import LAST_RESORTS, Candidate
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec


def short_of_a_node(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> list[Layout]:
    """Layouts that break no rule but those of host memory and disks; only DeepSpeed keeps state there."""
    if pins.engine not in (None, "deepspeed"):
        return []
    asked = Workload(model=model, cluster=cluster, job=job, layout=Layout(engine="deepspeed", implementation="local"))
    return [
        layout
        for layout in layouts(model, cluster, job, pins, "deepspeed", LAST_RESORTS)
        if (layout.offload_optimizer, layout.offload_param) != ("none", "none")
        and {violation.rule for violation in violations(asked.with_layout(layout))} <= NODE_CAPACITY
    ]


def nearest_miss(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, considered: Iterable[Candidate]
) -> Layout | None:
    """Of the legal layouts that were weighed and those that only their node is too small for; null without any."""
    misses = [*(candidate.layout for candidate in considered), *short_of_a_node(model, cluster, job, pins)]
    return min(misses, key=lambda layout: overshoot(model, cluster, job, layout), default=None)


def overshoot(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> tuple[int, list[float]]:
    """How many things there is too little of, and needed over there, the worst first; what a node does not say counts
    as half of what is needed."""
    shares = [peak_gib(model, cluster, job, layout) / usable_gib(cluster.gpu)]
    for needed, there in (
        (host_ram_gib_per_node(model, cluster, layout, job.precision), HOST_SHARE * (cluster.host_ram_gib or 0.0)),
        (nvme_gib_per_node(model, cluster, layout, job.precision), cluster.nvme_gib),
    ):
        if needed:
            shares.append(needed / there if there else 2.0)
    return sum(share > 1 for share in shares), sorted(shares, reverse=True)


def miss(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str:
    """What a layout that does not fit needs, what there is of it, and how many GiB are too many."""
    gpu, peak = cluster.gpu, peak_gib(model, cluster, job, layout)
    usable = usable_gib(gpu)
    parts = [f"needs {peak:.1f} GiB a GPU, {usable:.1f} of {gpu.memory_gib:.1f} are usable"]
    if peak > usable:
        parts[0] += f": {peak - usable:.1f} GiB too many"
    host, disks = (
        needed(model, cluster, layout, job.precision) for needed in (host_ram_gib_per_node, nvme_gib_per_node)
    )
    if host and cluster.host_ram_gib is None:
        parts.append(f"{host:.0f} GiB of host memory a node, which is not known")
    elif host and cluster.host_ram_gib is not None and host > HOST_SHARE * cluster.host_ram_gib:
        there = HOST_SHARE * cluster.host_ram_gib
        words = f"{host:.0f} GiB of host memory a node, {there:.0f} of {cluster.host_ram_gib:.0f} are usable"
        parts.append(f"{words}: {host - there:.0f} GiB too many")
    if disks and cluster.nvme_gib is None:
        parts.append(f"{disks:.0f} GiB of NVMe a node, which is not known")
    elif disks and cluster.nvme_gib is not None and disks > cluster.nvme_gib:
        over = disks - cluster.nvme_gib
        parts.append(f"{disks:.0f} GiB of NVMe a node, which has {cluster.nvme_gib:.0f}: {over:.0f} GiB too many")
    return "; ".join(parts)

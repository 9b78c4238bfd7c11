"""Why there is no plan, and the smallest changes that would give one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from kit.cost.efficiency import usable_gib
from kit.planner.describe import describe
from kit.planner.rule import Violation
from kit.planner.weighing import Found, illegal, search
from kit.specs.catalog import gpu_names, load_gpu
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Pins
from kit.specs.model import ModelSpec

MOST_NODES = 1024
"""Where looking for more nodes stops."""
MOST_CHANGES = 3
"""How many ways out are named."""


def nothing_legal(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> str:
    """Every broken rule of the layout nearest to the pins, for each engine allowed; one a line."""
    reasons = _able(illegal(model, cluster, job, pins))
    # A rule that all engines share is said once.
    lines: dict[str, list[str]] = {}
    for engine, broken in reasons.items():
        for violation in broken:
            lines.setdefault(str(violation), []).append(engine)
    everyone = len(reasons)
    return "\n".join(
        message if len(engines) == everyone else f"{' and '.join(engines)}: {message}"
        for message, engines in lines.items()
    )


def _able(reasons: dict[EngineName, tuple[Violation, ...]]) -> dict[EngineName, tuple[Violation, ...]]:
    """Without engines that could never do what is pinned (split a model), as long as another one could."""
    able = {
        engine: broken
        for engine, broken in reasons.items()
        if all(violation.rule not in ("data_parallel_only", "deepspeed_splits") for violation in broken)
    }
    return able or reasons


def nothing_fits(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, found: Found) -> str:
    """The nearest miss in GiB, and up to three changes that make it fit."""
    nearest = min(found.considered, key=lambda candidate: candidate.peak_gib)
    usable = usable_gib(cluster.gpu)
    lines = [
        f"{model.name} does not fit on {cluster.num_gpus} x {cluster.gpu.name}: the nearest layout "
        f"({describe(nearest.layout)}) needs {nearest.peak_gib:.1f} GiB a GPU, {usable:.1f} of "
        f"{cluster.gpu.memory_gib:.1f} are usable: {nearest.peak_gib - usable:.1f} GiB too many"
    ]
    lines += [
        f"it fits with {change}"
        for change in itertools.islice(changes_that_fit(model, cluster, job, pins), MOST_CHANGES)
    ]
    return "\n".join(lines)


def changes_that_fit(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[str]:
    """Changes that help, the smallest first."""
    for field in dataclasses.fields(pins):
        value = getattr(pins, field.name)
        if value is not None and _fits(model, cluster, job, dataclasses.replace(pins, **{field.name: None})):
            yield f"layout.{field.name} left to the planner instead of {value}"
    if cluster.host_ram_gib is None:
        known = dataclasses.replace(cluster, host_ram_gib=1024.0)
        if _fits(model, known, job, pins):
            yield "offload, once cluster.host_ram_gib says how much host memory a node has (1024 would do)"
    for factor in (2, 4, 8):
        larger_batch = dataclasses.replace(job, global_batch_size=factor * job.global_batch_size)
        if _fits(model, cluster, larger_batch, pins):
            yield f"job.global_batch_size={larger_batch.global_batch_size} instead of {job.global_batch_size}"
            break
    shorter = job.seq_length // 2
    while shorter >= 512:
        if _fits(model, cluster, dataclasses.replace(job, seq_length=shorter), pins):
            yield f"job.seq_length={shorter} instead of {job.seq_length}"
            break
        shorter //= 2
    yield from _more_nodes(model, cluster, job, pins)
    larger = sorted(
        (
            gpu
            for gpu in map(load_gpu, gpu_names())
            if gpu.device == "cuda"
            and gpu.memory_gib > cluster.gpu.memory_gib
            and gpu.bf16_tflops >= cluster.gpu.bf16_tflops  # more memory, and no slower
        ),
        key=lambda gpu: gpu.memory_gib,
    )
    for gpu in larger:
        if _fits(model, dataclasses.replace(cluster, gpu=gpu), job, pins):
            yield f"{gpu.name} ({gpu.memory_gib:.0f} GiB) instead of {cluster.gpu.name}"
            break


def _more_nodes(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[str]:
    if not cluster.inter_node_gbytes_per_s:
        return
    nodes = 2 * cluster.num_nodes
    while nodes <= MOST_NODES:
        if _fits(model, dataclasses.replace(cluster, num_nodes=nodes), job, pins):
            yield f"{nodes} nodes ({nodes * cluster.gpus_per_node} GPUs) instead of {cluster.num_nodes}"
            return
        nodes *= 2


def _fits(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> bool:
    return search(model, cluster, job, pins).best is not None

"""Why there is no plan, and the smallest changes that would give one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kit.cost.efficiency import usable_gib
from kit.planner.describe import describe
from kit.planner.rule import Violation
from kit.planner.weighing import Found, illegal, search
from kit.specs.catalog import gpu_names, load_gpu
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Pins
from kit.specs.model import ModelSpec

MOST_NODES = 1024
"""Where looking for more nodes stops."""
SHORTEST = 512
"""Tokens: shorter sequences are not proposed."""
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


@dataclass(frozen=True)
class _Change:
    """Something else to ask for."""

    kind: str
    """Of one kind only the smallest that helps is named."""
    factor: float
    """How small it is: by how many times a number that was asked for grows or shrinks; 1 where none does."""
    words: str
    cluster: ClusterSpec
    job: JobSpec
    pins: Pins


def changes_that_fit(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[str]:
    """Changes that help, the smallest first: by how many times the number that is changed grows or shrinks.

    To leave a choice to the planner, or to say what a node has, changes nothing that was asked for. Where two are
    equally small, the job changes before the hardware.
    """
    helped: set[str] = set()
    for change in sorted(_changes(cluster, job, pins), key=lambda change: change.factor):
        if change.kind not in helped and search(model, change.cluster, change.job, change.pins).best is not None:
            helped.add(change.kind)
            yield change.words


def _changes(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[_Change]:
    """All that are tried."""
    for field in dataclasses.fields(pins):
        value = getattr(pins, field.name)
        if value is not None:
            words = f"layout.{field.name} left to the planner instead of {value}"
            yield _Change(field.name, 1.0, words, cluster, job, dataclasses.replace(pins, **{field.name: None}))
    if cluster.host_ram_gib is None:
        words = "offload, once cluster.host_ram_gib says how much host memory a node has (1024 would do)"
        yield _Change("host", 1.0, words, dataclasses.replace(cluster, host_ram_gib=1024.0), job, pins)
    batch, length = job.global_batch_size, job.seq_length
    for factor in (2, 4, 8):
        larger = dataclasses.replace(job, global_batch_size=factor * batch)
        yield _Change(
            "batch", factor, f"job.global_batch_size={factor * batch} instead of {batch}", cluster, larger, pins
        )
    shorter = length // 2
    while shorter >= SHORTEST:
        words = f"job.seq_length={shorter} instead of {length}"
        yield _Change("length", length / shorter, words, cluster, dataclasses.replace(job, seq_length=shorter), pins)
        shorter //= 2
    nodes = 2 * cluster.num_nodes
    while nodes <= MOST_NODES and cluster.inter_node_gbytes_per_s:
        words = f"{nodes} nodes ({nodes * cluster.gpus_per_node} GPUs) instead of {cluster.num_nodes}"
        more = dataclasses.replace(cluster, num_nodes=nodes)
        yield _Change("nodes", nodes / cluster.num_nodes, words, more, job, pins)
        nodes *= 2
    for gpu in map(load_gpu, gpu_names()):
        if _is_larger(gpu, cluster.gpu):
            words = f"{gpu.name} ({gpu.memory_gib:.0f} GiB) instead of {cluster.gpu.name}"
            larger_gpu = dataclasses.replace(cluster, gpu=gpu)
            yield _Change("gpu", gpu.memory_gib / cluster.gpu.memory_gib, words, larger_gpu, job, pins)


def _is_larger(gpu: GpuSpec, own: GpuSpec) -> bool:
    """More memory, and no slower: neither its products nor its memory."""
    return (
        gpu.device == "cuda"
        and gpu.memory_gib > own.memory_gib
        and gpu.bf16_tflops >= own.bf16_tflops
        and gpu.hbm_gbytes_per_s >= own.hbm_gbytes_per_s
    )

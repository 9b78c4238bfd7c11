"""Why there is no plan, and the smallest changes that would give one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kit.planner import calibration
from kit.planner.calibration import Calibration
from kit.planner.describe import describe
from kit.planner.explain.near_miss import miss, nearest_miss
from kit.planner.rules import Violation
from kit.planner.weighing import Found, illegal, search
from kit.specs.catalog import gpu_names, load_gpu, node_names, parse_cluster
from kit.specs.catalog.rows import rows
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.specs.job import JobSpec, LoraSpec
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


_SPLITS = ("data_and_tensors_only", "deepspeed_splits", "deepspeed_pipeline")


def _able(reasons: dict[EngineName, tuple[Violation, ...]]) -> dict[EngineName, tuple[Violation, ...]]:
    """Without engines that could never do what is pinned (split a model), as long as another one could."""
    able = {
        engine: broken
        for engine, broken in reasons.items()
        if not any(violation.rule in _SPLITS for violation in broken)
    }
    return able or reasons


def nothing_fits(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    pins: Pins,
    found: Found,
    known: Calibration = calibration.NONE,
) -> str:
    """The nearest miss in GiB, and up to three changes that make it fit."""
    nearest = nearest_miss(model, cluster, job, pins, found.considered)
    if nearest is None:
        return nothing_legal(model, cluster, job, pins)
    lines = [
        f"{model.name} does not fit on {cluster.num_gpus} x {cluster.gpu.name}: the nearest layout "
        f"({describe(nearest)}) {miss(model, cluster, job, nearest)}"
    ]
    lines += [
        f"it fits with {change}"
        for change in itertools.islice(changes_that_fit(model, cluster, job, pins, known), MOST_CHANGES)
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


def changes_that_fit(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, known: Calibration = calibration.NONE
) -> Iterator[str]:
    """Changes that help, the smallest first: by how many times the number that is changed grows or shrinks.

    To leave a choice to the planner, or to say what a node has, changes nothing that was asked for. Where two are
    equally small, the job changes before the hardware. Adapters in place of all weights are another kind of training,
    and come last.
    """
    helped: set[str] = set()
    for change in sorted(_changes(cluster, job, pins), key=lambda change: change.factor):
        if change.kind in helped:
            continue
        if search(model, change.cluster, change.job, change.pins, known).best is not None:
            helped.add(change.kind)
            yield change.words


def _changes(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[_Change]:
    """All that are tried."""
    for field in dataclasses.fields(pins):
        value = getattr(pins, field.name)
        if value is not None:
            words = f"layout.{field.name} left to the planner instead of {value}"
            yield _Change(field.name, 1.0, words, cluster, job, dataclasses.replace(pins, **{field.name: None}))
    yield from _other_jobs(cluster, job, pins)
    yield from _host_memory(cluster, job, pins)
    yield from _more_gpus(cluster, job, pins)
    # Of GPUs as large, the slowest is the nearest to what was asked for.
    for gpu in sorted(map(load_gpu, gpu_names()), key=lambda gpu: gpu.bf16_tflops):
        if _is_larger(gpu, cluster.gpu):
            words = f"{gpu.name} ({gpu.memory_gib:.0f} GiB) instead of {cluster.gpu.name}"
            factor = round(gpu.memory_gib / cluster.gpu.memory_gib, 1)
            yield _Change("gpu", factor, words, dataclasses.replace(cluster, gpu=gpu), job, pins)


def _other_jobs(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[_Change]:
    batch, length = job.global_batch_size, job.seq_length
    for factor in (2, 4, 8):
        larger = dataclasses.replace(job, global_batch_size=factor * batch)
        words = f"job.global_batch_size={factor * batch} instead of {batch}"
        yield _Change("batch", factor, words, cluster, larger, pins)
    shorter = length // 2
    while shorter >= SHORTEST:
        words = f"job.seq_length={shorter} instead of {length}"
        yield _Change("length", length / shorter, words, cluster, dataclasses.replace(job, seq_length=shorter), pins)
        shorter //= 2
    if job.lora is None:
        for lora, what in ((LoraSpec(), "adapters"), (LoraSpec(four_bit=True), "adapters on 4-bit weights (QLoRA)")):
            words = f"job.lora: {what} trained instead of all weights"
            yield _Change("lora", math.inf, words, cluster, dataclasses.replace(job, lora=lora), pins)


def _host_memory(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[_Change]:
    """For offload: of a machine of one's own, as a provider's has what it has."""
    there = cluster.host_ram_gib
    if there is None:
        words = "offload, once cluster.host_ram_gib says how much host memory a node has (1024 would do)"
        yield _Change("host", 1.0, words, dataclasses.replace(cluster, host_ram_gib=1024.0), job, pins)
    elif not rows("nodes").get(cluster.name, {}).get("provider"):
        for factor in (2, 4, 8):
            words = f"cluster.host_ram_gib={factor * there:.0f} instead of {there:.0f}, for offload"
            more = dataclasses.replace(cluster, host_ram_gib=factor * there)
            yield _Change("host", factor, words, more, job, pins)
    if cluster.nvme_gib is None:
        for disks in (1024, 4096):
            words = f"offload to disks, once cluster.nvme_gib says how large a node's are ({disks} would do)"
            yield _Change("nvme", 1.0, words, dataclasses.replace(cluster, nvme_gib=float(disks)), job, pins)


def _more_gpus(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[_Change]:
    """The rest of a node of the catalog first, then more nodes."""
    whole = cluster
    if cluster.num_nodes == 1 and cluster.name in node_names():
        whole = parse_cluster(f"{cluster.name}:1")
        gpus = 2 * cluster.gpus_per_node
        while gpus <= whole.gpus_per_node:
            share = gpus / cluster.gpus_per_node if cluster.host_ram_gib != whole.host_ram_gib else 1.0
            more = dataclasses.replace(
                cluster,
                gpus_per_node=gpus,
                host_ram_gib=cluster.host_ram_gib and cluster.host_ram_gib * share,
                nvme_gib=cluster.nvme_gib and cluster.nvme_gib * share,
            )
            words = f"{gpus} GPUs of a {cluster.name} instead of {cluster.gpus_per_node}"
            yield _Change("nodes", gpus / cluster.num_gpus, words, more, job, pins)
            gpus *= 2
    nodes = 2 * cluster.num_nodes
    while nodes <= MOST_NODES and cluster.inter_node_gbytes_per_s:
        gpus = nodes * whole.gpus_per_node
        words = f"{nodes} nodes ({gpus} GPUs) instead of {cluster.num_nodes}"
        more = dataclasses.replace(whole, num_nodes=nodes)
        yield _Change("nodes", gpus / cluster.num_gpus, words, more, job, pins)
        nodes *= 2


def _is_larger(gpu: GpuSpec, own: GpuSpec) -> bool:
    """More memory, and no slower: neither its products nor its memory."""
    return (
        gpu.device == "cuda"
        and gpu.memory_gib > own.memory_gib
        and gpu.bf16_tflops >= own.bf16_tflops
        and gpu.hbm_gbytes_per_s >= own.hbm_gbytes_per_s
    )

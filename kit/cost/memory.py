"""Does it fit: peak memory of a rank of every pipeline stage, host memory and disk of a node.

A plan's layout becomes a ``TrainingSetup`` (``planned.py``); whose layers run decides which file says what is kept; and
``rank_memory.py`` adds it up moment by moment. Rows of published measurements take the same way (benchmarks/accuracy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kit.cost import huggingface_memory, megatron_memory, torch_memory
from kit.cost.efficiency import overheads, usable_gib
from kit.cost.offload import HOST_SHARE, host_load_gib_per_node, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.pipeline import distinct_stages
from kit.cost.planned import planned_setup
from kit.cost.prediction import StageMemory
from kit.cost.rank_memory import RankMemory, RankParts, peak_bytes, rank_memory
from kit.cost.setup import Kernels, TrainingSetup
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import GIB, to_gib

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")

TIGHT = 0.95
"""Share of the usable memory above which a fit is called tight: predictions are not better than that."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What a layout needs, and whether it fits. GiB."""

    layout: Layout
    stages: tuple[StageMemory, ...]
    """Peak of a GPU of every pipeline stage, by component, and by phase."""
    usable_gib: float
    """Of a GPU, less the margin for fragmentation."""
    memory_gib: float
    host_ram_gib_per_node: float
    """While it trains."""
    host_load_gib_per_node: float
    """While it loads weights."""
    nvme_gib_per_node: float
    verdict: Verdict
    binding: str
    """What is fullest: the largest component of the fullest stage, or ``host memory`` or ``NVMe`` where that does not
    fit."""

    @property
    def peak_gib(self) -> float:
        """Of the fullest stage."""
        return max(stage.peak_gib for stage in self.stages)


def peak(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> MemoryReport:
    """What a layout needs on each GPU, in host memory and on disk. The planner's rules say which layouts are legal."""
    stages = peak_memory(model, cluster, job, layout)
    fullest = max(stages, key=lambda stage: stage.peak_gib)
    usable = usable_gib(cluster.gpu)
    host = host_ram_gib_per_node(model, cluster, layout, job.precision)
    load = host_load_gib_per_node(model, cluster, layout, job.precision)
    nvme = nvme_gib_per_node(model, cluster, layout, job.precision)
    binding = max(fullest.components_gib, key=lambda name: fullest.components_gib[name])
    verdict: Verdict = "fits" if fullest.peak_gib <= TIGHT * usable else "tight"
    # What a node does not say it has not (the planner's rules refuse it too).
    if host > HOST_SHARE * (cluster.host_ram_gib or 0) or (cluster.host_ram_gib and load > cluster.host_ram_gib):
        verdict, binding = "does not fit", "host memory"
    if nvme > (cluster.nvme_gib or 0):
        verdict, binding = "does not fit", "NVMe"
    if fullest.peak_gib > usable:
        verdict = "does not fit"
        binding = max(fullest.components_gib, key=lambda name: fullest.components_gib[name])
    return MemoryReport(
        layout=layout,
        stages=stages,
        usable_gib=usable,
        memory_gib=cluster.gpu.memory_gib,
        host_ram_gib_per_node=host,
        host_load_gib_per_node=load,
        nvme_gib_per_node=nvme,
        verdict=verdict,
        binding=binding,
    )


def peak_memory(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> tuple[StageMemory, ...]:
    """One entry a pipeline stage: the fullest moment of a rank's step."""
    setup = planned_setup(model, cluster, job, layout)
    overhead = overhead_gib(cluster, layout)
    return tuple(_stage(setup, stage, overhead) for stage in range(layout.pp))


def _stage(setup: TrainingSetup, stage: int, overhead: float) -> StageMemory:
    memory = memory_of(setup, stage)
    fullest = {name: to_gib(memory.peak.get(name, 0.0)) for name in COMPONENTS}
    return StageMemory(
        stage=stage,
        components_gib=fullest | {"overhead": overhead},
        phases_gib={name: to_gib(sum(moment.values())) + overhead for name, moment in memory.phases.items()},
    )


def peak_gib(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> float:
    """Peak of the fullest stage: what a search compares. The same as ``peak`` says, without components."""
    setup = planned_setup(model, cluster, job, layout)
    fullest = max(peak_bytes(parts_of(setup, stage)) for stage in distinct_stages(layout))
    return fullest / GIB + overhead_gib(cluster, layout)


def memory_of(setup: TrainingSetup, stage: int) -> RankMemory:
    """Of a rank of one pipeline stage, by moment and component, CUDA's and NCCL's own memory apart."""
    return rank_memory(parts_of(setup, stage))


def parts_of(setup: TrainingSetup, stage: int) -> RankParts:
    """By the implementation that computes the layers."""
    return _PARTS[setup.kernels](setup, stage)


_PARTS: dict[Kernels, Callable[[TrainingSetup, int], RankParts]] = {
    "transformer_engine": megatron_memory.rank_parts,
    "megatron-local": megatron_memory.rank_parts,
    "local": megatron_memory.rank_parts,
    "huggingface": huggingface_memory.rank_parts,
    "nanotron": torch_memory.rank_parts,
    "litgpt": torch_memory.rank_parts,
    "torchtune": torch_memory.rank_parts,
    "torchtitan": torch_memory.rank_parts,
}


def overhead_gib(cluster: ClusterSpec, layout: Layout) -> float:
    """The CUDA context and NCCL's communicators (the world's, and one for every kind of parallelism)."""
    table = overheads()
    if cluster.gpu.device == "cpu":
        return table.cpu_process_gib
    kinds = sum(size > 1 for size in (layout.tp, layout.cp, layout.dp, layout.pp, layout.ep))
    communicators = kinds + 1 if kinds > 1 else kinds
    return table.context_gib + communicators * table.communicator_gib

"""Does it fit: peak memory of a rank of every pipeline stage, host memory and disk of a node.

The implementation of layers decides which file counts the parts of a rank (``rank_huggingface.py``,
``rank_megatron.py``); ``phases.py`` adds them up moment by moment. Published runs take the same way
(benchmarks/accuracy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kit.cost.hardware import overheads, usable_gib
from kit.cost.memory import rank_huggingface, rank_megatron
from kit.cost.memory.engine import engine_memory, rank_states
from kit.cost.memory.offload import HOST_SHARE, host_load_gib_per_node, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.phases import RankParts, peak_bytes, rank_memory
from kit.cost.prediction import StageMemory
from kit.cost.workload import Workload
from kit.specs.layout import Layout
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
    """Memory of a GPU, less the margin for fragmentation."""
    memory_gib: float
    host_ram_gib_per_node: float
    """Host memory during training."""
    host_load_gib_per_node: float
    """Host memory while weights are loaded."""
    nvme_gib_per_node: float
    verdict: Verdict
    binding: str
    """What is fullest: the largest component of the fullest stage, or ``host memory`` or ``NVMe`` where that does not
    fit."""

    @property
    def peak_gib(self) -> float:
        """Peak of the fullest stage."""
        return max(stage.peak_gib for stage in self.stages)


def peak(workload: Workload) -> MemoryReport:
    """What a layout needs on each GPU, in host memory and on disk. The planner's rules say which layouts are legal."""
    cluster = workload.cluster
    stages = peak_memory(workload)
    fullest = max(stages, key=lambda stage: stage.peak_gib)
    usable = usable_gib(cluster.gpu)
    host = host_ram_gib_per_node(workload)
    load = host_load_gib_per_node(workload)
    nvme = nvme_gib_per_node(workload)
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
        layout=workload.layout,
        stages=stages,
        usable_gib=usable,
        memory_gib=cluster.gpu.memory_gib,
        host_ram_gib_per_node=host,
        host_load_gib_per_node=load,
        nvme_gib_per_node=nvme,
        verdict=verdict,
        binding=binding,
    )


def peak_memory(workload: Workload) -> tuple[StageMemory, ...]:
    """One entry a pipeline stage: the fullest moment of a rank's step."""
    return tuple(_stage(workload, stage) for stage in range(workload.layout.pp))


def _stage(workload: Workload, stage: int) -> StageMemory:
    memory, overhead = rank_memory(parts_of(workload, stage)), overhead_gib(workload)
    fullest = {name: to_gib(memory.peak.get(name, 0.0)) for name in COMPONENTS}
    return StageMemory(
        stage=stage,
        components_gib=fullest | {"overhead": overhead},
        phases_gib={name: to_gib(sum(moment.values())) + overhead for name, moment in memory.phases.items()},
    )


def peak_gib(workload: Workload) -> float:
    """Peak of the fullest stage, which a search compares. Equals the peak of ``peak``, without its components."""
    fullest = max(peak_bytes(parts_of(workload, stage)) for stage in workload.distinct_stages)
    return fullest / GIB + overhead_gib(workload)


def parts_of(workload: Workload, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage in parts, without CUDA's and NCCL's own memory."""
    engine = engine_memory(workload)
    states = rank_states(engine, workload.parameters[stage], stage)
    whole = workload.implementation == "huggingface"
    rank_parts = rank_huggingface.rank_parts if whole else rank_megatron.rank_parts
    return rank_parts(workload, engine, states, stage)


def overhead_gib(workload: Workload) -> float:
    """The CUDA context and NCCL's communicators (the world's, and one for every kind of parallelism)."""
    table, layout = overheads(), workload.layout
    if workload.cluster.gpu.device == "cpu":
        return table.cpu_process_gib
    kinds = (layout.tp > 1) + (layout.cp > 1) + (layout.dp > 1) + (layout.pp > 1) + (layout.ep > 1)
    communicators = kinds + 1 if kinds > 1 else kinds
    return table.context_gib + communicators * table.communicator_gib

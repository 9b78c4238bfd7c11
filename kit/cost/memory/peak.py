"""Peak memory of every pipeline stage's GPU, host memory and disk of a node, and whether the layout fits.

``rank_huggingface.py`` or ``rank_megatron.py`` counts the parts of a rank's memory, and ``phases.py`` adds the parts
that exist at the same moment. Published runs use the same functions (benchmarks/accuracy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kit.cost.hardware import overheads, usable_gib
from kit.cost.memory import rank_huggingface, rank_megatron
from kit.cost.memory.offload import HOST_SHARE, host_load_gib_per_node, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.phases import EngineMemory, RankParts, fullest, peak_bytes, phases_of
from kit.cost.memory.states_and_buffers import engine_memory, rank_states
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
    """Memory that a layout needs, in GiB, and whether it fits."""

    layout: Layout
    stages: tuple[StageMemory, ...]
    """Peak of one GPU of every pipeline stage, by component and by phase."""
    usable_gib: float
    """Memory of a GPU minus the margin for fragmentation."""
    memory_gib: float
    host_ram_gib_per_node: float
    """Host memory during training."""
    host_load_gib_per_node: float
    """Host memory while weights are loaded."""
    nvme_gib_per_node: float
    verdict: Verdict
    binding: str
    """The largest component of the fullest stage; ``host memory`` or ``NVMe`` if these do not fit and the GPU does."""

    @property
    def peak_gib(self) -> float:
        """Peak of the fullest stage."""
        return max(stage.peak_gib for stage in self.stages)


def peak(workload: Workload) -> MemoryReport:
    """Memory of a workload on each GPU, in host memory and on disk. The layout must satisfy the planner's rules."""
    cluster = workload.cluster
    stages = peak_memory(workload)
    fullest = max(stages, key=lambda stage: stage.peak_gib)
    usable = usable_gib(cluster.gpu)
    host = host_ram_gib_per_node(workload)
    load = host_load_gib_per_node(workload)
    nvme = nvme_gib_per_node(workload)
    binding = max(fullest.components_gib, key=lambda name: fullest.components_gib[name])
    verdict: Verdict = "fits" if fullest.peak_gib <= TIGHT * usable else "tight"
    # An unknown capacity counts as 0; the planner's rules also refuse offload to it.
    if fullest.peak_gib > usable:
        verdict = "does not fit"
    elif nvme > (cluster.nvme_gib or 0):
        verdict, binding = "does not fit", "NVMe"
    elif host > HOST_SHARE * (cluster.host_ram_gib or 0) or (cluster.host_ram_gib and load > cluster.host_ram_gib):
        verdict, binding = "does not fit", "host memory"
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
    """Peak memory of a rank, one entry per pipeline stage."""
    return tuple(_stage(workload, stage) for stage in range(workload.layout.pp))


def _stage(workload: Workload, stage: int) -> StageMemory:
    phases, overhead = phases_of(parts_of(workload, stage)), overhead_gib(workload)
    peak = fullest(*phases.values())
    return StageMemory(
        stage=stage,
        components_gib={name: to_gib(peak.get(name, 0.0)) for name in COMPONENTS} | {"overhead": overhead},
        phases_gib={name: to_gib(sum(moment.values())) + overhead for name, moment in phases.items()},
    )


def peak_gib(workload: Workload) -> float:
    """Peak GiB of the fullest stage, the figure that a search compares; equal to ``peak(workload).peak_gib``."""
    engine = engine_memory(workload)
    fullest = max(peak_bytes(_parts_of(workload, engine, stage)) for stage in workload.stages.distinct)
    return fullest / GIB + overhead_gib(workload)


def parts_of(workload: Workload, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage by part, without the CUDA context and NCCL."""
    return _parts_of(workload, engine_memory(workload), stage)


def _parts_of(workload: Workload, engine: EngineMemory, stage: int) -> RankParts:
    states = rank_states(engine, workload.parameters[stage], stage)
    whole = workload.implementation == "huggingface"
    rank_parts = rank_huggingface.rank_parts if whole else rank_megatron.rank_parts
    return rank_parts(workload, engine, states, stage)


def overhead_gib(workload: Workload) -> float:
    """GiB of the CUDA context and NCCL's communicators: one per kind of parallelism, and one for the world if there are
    several kinds; and the share of a vLLM that does not sleep. On CPU: GiB of the process."""
    table, layout = overheads(), workload.layout
    if workload.cluster.gpu.device == "cpu":
        return table.cpu_process_gib
    share = workload.vllm_share
    vllm = 0.0 if share and workload.vllm_sleeps else share * workload.cluster.gpu.memory_gib
    kinds = (layout.tp > 1) + (layout.cp > 1) + (layout.dp > 1) + (layout.pp > 1) + (layout.ep > 1)
    communicators = kinds + 1 if kinds > 1 else kinds
    return table.context_gib + communicators * table.communicator_gib + vllm

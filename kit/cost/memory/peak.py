"""Peak memory of every pipeline stage's GPU, host memory and disk of a node, and whether the layout fits.

``rank_huggingface.py`` or ``rank_megatron.py`` counts the parts of a rank's memory (``RankParts``). Those that exist at
the same moment are added up here: activations are fullest when the loss is computed, gradients at the end of backward,
and the optimizer step may need copies. Published runs use the same functions (benchmarks/accuracy).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kit.cost.hardware import overheads, usable_gib
from kit.cost.memory import rank_huggingface, rank_megatron
from kit.cost.memory.offload import HOST_SHARE, host_load_gib_per_node, host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.parts import EngineMemory, RankParts
from kit.cost.memory.states_and_buffers import engine_memory, rank_states
from kit.cost.workload import Workload
from kit.specs.layout import Layout
from kit.specs.validation import Text, stored
from kit.units import GIB, to_gib

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")

TIGHT = 0.95
"""Share of the usable memory above which a fit is called tight: predictions are not better than that."""

Moment = dict[str, float]
"""Component → bytes."""

Verdict = Literal["fits", "tight", "does not fit"]


@stored
class StageMemory:
    """Peak memory of one GPU of one pipeline stage, GiB by component."""

    stage: int
    """Pipeline stage, from 0."""
    components_gib: dict[Text, float]
    """weights, gradients, optimizer, activations, logits, buffers, overhead."""
    phases_gib: dict[Text, float] = field(default_factory=dict)
    """Peak of load, forward, backward, step and save."""

    @property
    def peak_gib(self) -> float:
        """Sum of the components."""
        return sum(self.components_gib.values())


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
    largest = max(stages, key=lambda stage: stage.peak_gib)
    usable = usable_gib(cluster.gpu)
    host = host_ram_gib_per_node(workload)
    load = host_load_gib_per_node(workload)
    nvme = nvme_gib_per_node(workload)
    binding = max(largest.components_gib, key=lambda name: largest.components_gib[name])
    verdict: Verdict = "fits" if largest.peak_gib <= TIGHT * usable else "tight"
    # An unknown capacity counts as 0; the planner's rules also refuse offload to it.
    if largest.peak_gib > usable:
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
    largest = fullest(*phases.values())
    return StageMemory(
        stage=stage,
        components_gib={name: to_gib(largest.get(name, 0.0)) for name in COMPONENTS} | {"overhead": overhead},
        phases_gib={name: to_gib(sum(moment.values())) + overhead for name, moment in phases.items()},
    )


def peak_gib(workload: Workload) -> float:
    """Peak GiB of the fullest stage, the figure that a search compares; equal to ``peak(workload).peak_gib``."""
    engine = engine_memory(workload)
    largest = max(peak_bytes(_parts_of(workload, engine, stage)) for stage in workload.stages.distinct)
    return largest / GIB + overhead_gib(workload)


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


# ---------------------------------------------------------------- a rank, moment by moment


def peak_bytes(parts: RankParts) -> float:
    """Peak bytes: the sum of the fullest of ``phases_of(parts)``, computed without its components."""
    states = parts.states
    in_forward = states.gradients_in_forward + parts.saved_activations
    layer = parts.recomputed_layer + parts.backward_workspace
    moments = (
        parts.gathered_in_loss + parts.buffers_in_loss + in_forward + parts.deferred_gradients + parts.loss,
        parts.gathered + parts.buffers_in_loss + in_forward - parts.freed_before_layers + layer,
        parts.gathered_at_end + states.gradients + parts.after_backward + layer,
        states.gradients_in_step + states.extra_in_step,
        states.gradients_between_steps + parts.save,
        parts.gathered_in_loss + sum(parts.casts_in_forward) + in_forward,
        states.gradients_between_steps + parts.generation,
    )
    peak = states.weights + states.optimizer + parts.buffers + max(moments)
    return max(peak, parts.load)


def phases_of(parts: RankParts) -> dict[str, Moment]:
    """The peak moment of load, forward, backward, step and save."""
    states, buffers = parts.states, parts.buffers
    constant = {
        "weights": states.weights,
        "gradients": states.gradients_in_forward,
        "optimizer": states.optimizer,
        "activations": 0.0,
        "logits": 0.0,
        "buffers": buffers,
    }
    layer = parts.recomputed_layer + parts.backward_workspace
    in_forward = buffers + parts.gathered_in_loss
    in_loss = in_forward + parts.buffers_in_loss
    in_backward = buffers + parts.gathered + parts.buffers_in_loss
    at_end = buffers + parts.gathered_at_end
    cast_buffers, cast_logits = parts.casts_in_forward
    loss = constant | {
        "activations": parts.saved_activations,
        "logits": parts.deferred_gradients + parts.loss,
        "buffers": in_loss,
    }
    casts = constant | {
        "activations": parts.saved_activations,
        "logits": cast_logits,
        "buffers": in_forward + cast_buffers,
    }
    saved_by_layers = parts.saved_activations - parts.freed_before_layers
    first_back = constant | {"activations": saved_by_layers + layer, "buffers": in_backward}
    ended = constant | {"activations": layer, "gradients": states.gradients + parts.after_backward, "buffers": at_end}
    step = constant | {"gradients": states.gradients_in_step + states.extra_in_step}
    between = constant | {"gradients": states.gradients_between_steps}
    return {
        "load": fullest(between, dict.fromkeys(constant, 0.0) | {"weights": parts.load}),
        "forward": fullest(loss, casts, between | {"activations": parts.generation}),
        "backward": fullest(first_back, ended),
        "step": step,
        "save": between | {"buffers": buffers + parts.save},
    }


def fullest(*moments: Moment) -> Moment:
    """The moment with the most memory."""
    return max(moments, key=lambda parts: sum(parts.values()))

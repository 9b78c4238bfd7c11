"""Peak memory of a rank of every pipeline stage, by component.

The peak moves over a step: activations are fullest when backward begins, gradients when it ends, and the optimizer may
need copies. Each moment is added up, and the fullest one is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kit.cost import activations, deepspeed_sizes, offload
from kit.cost.efficiency import overheads
from kit.cost.params import count, rank_experts, rank_parameters
from kit.cost.pipeline import distinct_stages, stage_layers
from kit.cost.prediction import StageMemory
from kit.cost.states import state_bytes
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import GIB, to_gib

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")

ZERO3_SUB_GROUP = 10**9
"""Parameters that a stage-3 step converts at a time (runtime/zero/config.py: sub_group_size)."""


def peak_memory(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> tuple[StageMemory, ...]:
    """One entry a pipeline stage: the fullest moment of a rank's step."""
    return tuple(
        StageMemory(
            stage=stage,
            components_gib={
                name: to_gib(size) for name, size in stage_bytes(model, cluster, job, layout, stage).items()
            },
        )
        for stage in range(layout.pp)
    )


def peak_gib(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> float:
    """Peak of the fullest stage. Those after the second hold less than it, but for the last."""
    stages = distinct_stages(layout)
    return to_gib(max(sum(stage_bytes(model, cluster, job, layout, stage).values()) for stage in stages))


def micro_batches_in_flight(layout: Layout, stage: int) -> float:
    """Micro batches whose activations a stage holds at once; a fraction where virtual stages split it.

    1F1B: the stage's distance from the end, plus its own (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    Interleaved, in chunks of 1/v of a stage: 2·(p−i−1) + (v−1)·p warm-up chunks and one more
    (megatron-core, pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    m, p, v = layout.gradient_accumulation_steps, layout.pp, layout.vp
    if v == 1:
        return min(m, p - stage)
    return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v


@dataclass(frozen=True)
class _Dynamic:
    """Bytes of a stage that come and go with its micro batches."""

    kept: float
    """Saved for backward, all micro batches in flight."""
    one_layer: float
    """What the backward of one layer needs beyond that."""
    logits: float


def stage_bytes(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout, stage: int) -> dict[str, float]:
    """Bytes by component of a rank of one stage, at its fullest moment."""
    layers = stage_layers(model, layout, stage)
    dense = rank_parameters(model, layout.tp, layout.pp, stage, layers)
    experts = rank_experts(model, layout.pp, layout.ep, layout.etp, stage, layers)
    parameters = dense + experts
    state = state_bytes(layout, job.precision)
    # Experts are alike on other ranks than the rest, which changes what the distributed optimizer shards over.
    of_experts = state_bytes(replace(layout, dp=layout.expert_dp, cp=1), job.precision)
    dynamic = _dynamic(model, job, layout, stage)
    buffers = _buffers(model, cluster, job, layout)
    constant = {
        "weights": state.weights * parameters,
        "optimizer": state.optimizer * dense + of_experts.optimizer * experts,
        "buffers": buffers,
        "overhead": _overhead(cluster, layout) * GIB,
    }
    in_forward, at_end = state.gradients_in_forward * parameters, state.gradients * parameters
    backward_begins = {
        "gradients": in_forward,
        "activations": dynamic.kept,
        "logits": dynamic.logits,
        "buffers": buffers + _autocast_copies(model, job, layout, during_loss=True),
    }
    first_layer_back = {
        "gradients": in_forward,
        "activations": dynamic.kept + dynamic.one_layer,
        "buffers": buffers + _autocast_copies(model, job, layout, during_loss=True),
    }
    backward_ends = {"gradients": at_end, "activations": dynamic.one_layer}
    in_step = at_end if state.gradients_in_step is None else state.gradients_in_step * parameters
    step = {"gradients": in_step + _step_extra(state.extra_in_step, parameters, layout)}
    moments: list[dict[str, float]] = [backward_begins, first_layer_back, backward_ends, step]
    if layout.recompute == "full" and activations.uses_autocast(job.precision, layout):
        # Casts of weights are cached until the forward pass leaves autocast, before the loss is computed.
        copies = buffers + _autocast_copies(model, job, layout, during_loss=False)
        bf16_logits = _tokens(job, layout) * 2.0 * model.vocab_size
        moments.append({"gradients": in_forward, "activations": dynamic.kept, "logits": bf16_logits, "buffers": copies})
    if layout.engine == "torch" or (layout.engine == "deepspeed" and layout.zero_stage < 3):
        # Built whole and in fp32 on the device, before it is cast or sharded (kit/engines).
        moments.append({"weights": 4.0 * parameters, "optimizer": 0.0, "buffers": 0.0})
    fullest = max((constant | moment for moment in moments), key=lambda parts: sum(parts.values()))
    return {name: fullest.get(name, 0.0) for name in COMPONENTS}


def _dynamic(model: ModelSpec, job: JobSpec, layout: Layout, stage: int) -> _Dynamic:
    tokens = _tokens(job, layout)
    layers = len(stage_layers(model, layout, stage)) + model.encoder_layers // layout.pp
    in_flight = micro_batches_in_flight(layout, stage)
    per_layer = activations.layer_bytes_per_token(model, job, layout) * tokens
    working = activations.working_bytes_per_token(model, job, layout) * tokens
    last = stage == layout.pp - 1
    logits = activations.logits_bytes_per_token(model, job, layout) * tokens if last else 0.0
    if layout.recompute == "full":
        kept = activations.layer_input_bytes_per_token(model, job, layout) * tokens * layers * in_flight
        return _Dynamic(kept=kept, one_layer=per_layer + working, logits=logits)
    if layout.recompute == "selective":
        whole = activations.layer_bytes_per_token(model, job, replace(layout, recompute="none")) * tokens
        working += whole - per_layer
    return _Dynamic(kept=per_layer * layers * in_flight, one_layer=working, logits=logits)


def _tokens(job: JobSpec, layout: Layout) -> float:
    """Tokens of a micro batch on one rank."""
    return layout.micro_batch_size * job.seq_length / layout.cp


def _autocast_copies(model: ModelSpec, job: JobSpec, layout: Layout, during_loss: bool) -> float:
    """bf16 casts of fp32 weights: kept by every matmul for its backward, or, under recompute, by the head alone."""
    if not activations.uses_autocast(job.precision, layout):
        return 0.0
    head = model.vocab_size * model.hidden_size
    if layout.recompute == "full" and during_loss:
        return 2.0 * head
    return 2.0 * (count(model).layer_matrices + head)


def _buffers(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> float:
    """What is gathered, and buckets; those of DDP and Megatron hold the gradients themselves."""
    if layout.engine == "megatron" or layout.zero_stage == 0:
        return 0.0
    element = 2.0 if job.precision != "fp32" else 4.0
    if layout.engine == "torch":
        return _fsdp_buffers(model, layout, element)
    if layout.autocast:
        element = 4.0
    # hpZ keeps weights once more, spread over the ranks of a node, from their first gather of a step until its end.
    second_copy = element * count(model).total / layout.zero_hpz if layout.zero_hpz > 1 else 0.0
    kept = offload.device_buffer_bytes(model, cluster, layout, job.precision)
    if layout.zero_stage < 3:
        bucket = deepspeed_sizes.reduce_bucket(model, cluster, layout) * element
        return kept + 2 * bucket  # double buffering: contiguous_gradients with overlap_comm
    prefetched = deepspeed_sizes.prefetch_bucket(model, cluster, layout)
    live = deepspeed_sizes.live_parameters(model, cluster, layout) + prefetched
    if layout.offload_param == "nvme":
        # Each weight is released after its use (stage3_max_reuse_distance=0 in kit/emit/deepspeed.py).
        live = min(live, deepspeed_sizes.largest_parameter(model) + 2 * prefetched)
    return kept + live * element + second_copy


def _fsdp_buffers(model: ModelSpec, layout: Layout, element: float) -> float:
    """FSDP2 (torch/distributed/fsdp/_fully_shard): gathered weights and gradients on their way to be scattered.

    The root (embedding, final norm, head) stays gathered from forward to backward, in stage 2 the layers do too; in
    stage 3 one layer computes while the next is gathered. A unit's gradients exist in the compute dtype and as the
    fp32 input of the reduce-scatter, those of the layer before still being sent.
    """
    counts = count(model)
    root = counts.total - counts.layers
    gathered_layers = counts.layers if layout.zero_stage == 2 else 2 * counts.layer.total
    return element * (root + gathered_layers) + (element + 2 * 4.0) * counts.layer.total


def _step_extra(bytes_per_parameter: float, parameters: int, layout: Layout) -> float:
    extra = bytes_per_parameter * parameters
    return min(extra, 4.0 * ZERO3_SUB_GROUP) if layout.zero_stage == 3 else extra


def _overhead(cluster: ClusterSpec, layout: Layout) -> float:
    """GiB: the CUDA context and NCCL's communicators (the world's, and one for every kind of parallelism)."""
    table = overheads()
    if cluster.gpu.device == "cpu":
        return table.cpu_process_gib
    kinds = sum(size > 1 for size in (layout.tp, layout.cp, layout.dp, layout.pp, layout.ep))
    communicators = kinds + 1 if kinds > 1 else kinds
    return table.context_gib + communicators * table.communicator_gib

"""Weights that engines gather, and buffers that gradients are sent in, of a plan: DeepSpeed's, FSDP2's, offload's."""

from __future__ import annotations

from kit.cost.memory import deepspeed_sizes, offload
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def engine_buffers(workload: Workload) -> tuple[float, tuple[float, float, float]]:
    """(what stays, what comes and goes: in the loss, in a layer's backward, at the end of backward): gathered weights,
    and buckets; Megatron's and DDP's hold the gradients."""
    model, layout, precision = workload.model, workload.layout, workload.job.precision
    if layout.engine == "megatron" or layout.zero_stage == 0:
        return 0.0, (0.0, 0.0, 0.0)
    element = 4.0 if precision == "fp32" else 2.0
    if layout.engine == "torch":
        return 0.0, _fsdp_buffers(model, layout, element)
    if layout.autocast:
        element = 4.0
    sizes = deepspeed_sizes.buffer_sizes(model, workload.cluster, layout)
    kept = offload.device_buffer_bytes(workload)
    if layout.zero_stage < 3:
        # double buffering: contiguous_gradients with overlap_comm
        buckets = 2 * sizes["reduce_bucket_size"] * element
        return kept, (0.0, buckets, buckets)
    largest = deepspeed_sizes.largest_parameter(model)
    prefetched = sizes["stage3_prefetch_bucket_size"] / layout.tp
    # What is in use is whole, however little may stay so.
    live = max(sizes["stage3_max_live_parameters"], largest) / layout.tp + prefetched
    if layout.offload_param == "nvme":
        # Each weight is released after its use (stage3_max_reuse_distance=0 in kit/emit/deepspeed.py).
        live = min(live, largest + 2 * prefetched)
    live += deepspeed_sizes.persistent_parameters(model, sizes["stage3_param_persistence_threshold"]) / layout.tp
    # hpZ keeps weights once more, spread over the ranks of a node, from their first gather of a step until its end.
    second_copy = element * count(model).total / layout.tp / layout.zero_hpz if layout.zero_hpz > 1 else 0.0
    held = live * element + second_copy
    return kept, (held, held, held)


def _fsdp_buffers(model: ModelSpec, layout: Layout, element: float) -> tuple[float, float, float]:
    """FSDP2 (torch/distributed/fsdp/_fully_shard): gathered weights and gradients on their way to be scattered.

    The root (embedding, final norm, head) stays gathered from forward to backward, in stage 2 the layers do too; in
    stage 3 one layer computes while the next is gathered. A unit's gradients exist in the compute dtype and as the
    fp32 input of the reduce-scatter, which the layer before keeps until this one's is made (_fsdp_param_group.py,
    post_backward); the root's are sent last, the head's are there from the beginning. Activations are fullest in the
    MLP's backward, before attention's gradients are made.
    """
    counts = count(model)
    root = counts.total - counts.layers
    layer = counts.layer.total / layout.tp
    kept = counts.layers / layout.tp if layout.zero_stage == 2 else 0.0
    gathered = max(kept, 2 * layer)
    attention = counts.layer.attention / layout.tp
    # Gradients come out of the reduce-scatter in fp32, all of a unit, before they are kept in 16 bits.
    scattered = 4.0 / layout.dp if layout.gradient_dtype == "bf16" else 0.0
    head = counts.head or (counts.embedding - counts.positions)
    return (
        element * (root + kept),
        element * (root + gathered + head + layer - attention) + (4.0 + scattered) * layer,
        (element + 4.0 + scattered) * root,
    )

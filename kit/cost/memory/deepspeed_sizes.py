"""Sizes of DeepSpeed's buffers, in elements: pinned, or chosen here. The plan states them, the emitter writes them,
and the cost model counts them.

A choice follows from the model and the layout. DeepSpeed's own defaults (5e8-element buckets, 1e9-element sub groups,
1e8-element NVMe buffers) fit one size of model and one size of GPU.
"""

from __future__ import annotations

import math

from kit.cost.collectives import fills_the_link
from kit.cost.hardware import shared
from kit.cost.model.params import count
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import ZERO_KEYS, Layout
from kit.specs.model import ModelSpec
from kit.units import GIB

NVME_BLOCK_BYTES = 1024**2
"""One request to the disk. DeepSpeed swaps only what is at least this large, and never less than 1 MiB
(swap_tensor/utils.py, MIN_AIO_BYTES): norms and biases stay in host memory."""
NVME_SUB_GROUP = 100_000_000
"""Parameters of a rank that are stepped at a time with the optimizer on NVMe: a read of 400 MB is bandwidth, not
latency, and four pinned buffers of it are 1.6 GB. DeepSpeed's default, 1e9, would pin 16 GB on every rank."""
NVME_SUB_GROUP_OF_ALL_RANKS = 800_000_000
"""Parameters of a sub group over all ranks, with weights on NVMe. Each rank then pins a buffer for the whole weights of
a sub group, not for its part of them (stage3.py, largest_partition_numel takes ``ds_numel`` of parameters, not of
partitions)."""
LEAST_NVME_SUB_GROUP = 10_000_000
"""Reads of 40 MB are bandwidth still."""
_OPTIMIZER_BUFFERS = 4
"""A master, its gradient and two moments are in host memory at once (partitioned_optimizer_swapper.py,
swap_in_optimizer_state: one buffer per state tensor and one for gradients)."""
_PARAM_BUFFERS = 5
"""A module of a transformer has one matrix, which is being gathered; the four that follow are read meanwhile
(partitioned_param_coordinator.py, __prefetch_nvme_param_partitions, as far as buffers are free)."""

LIVE_SHARE = 0.05
"""Part of a GPU's memory for gathered weights."""
NVME_LATENCY_S = 100e-6
"""Latency of a read from a data-centre NVMe drive: an order of magnitude, assumed. ``ds_nvme_tune`` measures a
machine's best values; those below keep a faster disk busy too."""
NVME_BYTES_PER_THREAD_S = 2e9
"""What one thread submits with direct I/O: assumed; below one drive's rate, so that a drive gets two threads."""


def buffer_sizes(model: ModelSpec, cluster: ClusterSpec, layout: Layout) -> dict[str, int]:
    """Field of ``Layout`` → size, of those that the stage and the offload read, and of those that are pinned."""
    chosen: dict[str, int] = {}
    if layout.engine == "deepspeed" and layout.zero_stage > 0:
        chosen["reduce_bucket_size"] = _reduce_bucket(model, cluster, layout)
    if layout.engine == "deepspeed" and layout.zero_stage == 3:
        chosen["stage3_prefetch_bucket_size"] = _prefetch_bucket(model, cluster, layout)
        chosen["stage3_max_live_parameters"] = _live_parameters(model, cluster)
        # Norms and biases (a few hidden sizes each) stay whole: gathering them is latency alone. No matrix is so small.
        chosen["stage3_param_persistence_threshold"] = 10 * model.hidden_size
    if layout.uses_nvme:
        chosen["sub_group_size"] = _sub_group_size(layout)
    if layout.offload_optimizer == "nvme":
        chosen["optimizer_buffer_count"] = _OPTIMIZER_BUFFERS
    if layout.offload_param == "nvme":
        chosen |= {"param_buffer_count": _PARAM_BUFFERS, "param_buffer_size": least_param_buffer(model, layout)}
    return chosen | {name: size for name in ZERO_KEYS if (size := getattr(layout, name)) is not None}


def nvme_queue_depth(cluster: ClusterSpec) -> int:
    """Requests in flight on a rank: what its part of the disks delivers within their latency, four times over so that
    the queue never runs dry; a power of two, 8 to 128."""
    share = _disk_bytes_per_s(cluster) / cluster.gpus_per_node
    needed = 4 * share * NVME_LATENCY_S / NVME_BLOCK_BYTES
    return int(min(128, max(8, 2 ** math.ceil(math.log2(needed)))))


def nvme_threads(cluster: ClusterSpec) -> int:
    """Threads of a rank that submit requests: as many as its part of the disks needs, at most 8."""
    if cluster.gpu.device == "cpu":
        return 1
    share = _disk_bytes_per_s(cluster) / cluster.gpus_per_node
    return min(8, max(1, math.ceil(share / NVME_BYTES_PER_THREAD_S)))


def _disk_bytes_per_s(cluster: ClusterSpec) -> float:
    return (cluster.nvme_gbytes_per_s or shared().nvme_gbytes_per_s) * 1e9


def largest_layer_matrix(model: ModelSpec) -> int:
    """Elements of the largest weight inside a transformer layer (embeddings are outside)."""
    return model.hidden_size * max(model.mlp_width, model.num_attention_heads * model.head_dim)


def largest_parameter(model: ModelSpec) -> int:
    """Elements of the largest weight of all: the embedding for most dense models, and for a mixture of experts a
    layer's gate and up projections of all experts, which transformers holds as one parameter (gate_up_proj)."""
    experts = model.num_experts * 2 * model.moe_ffn_hidden_size * model.hidden_size
    return max(largest_layer_matrix(model), model.vocab_size * model.hidden_size, experts)


def _reduce_bucket(model: ModelSpec, cluster: ClusterSpec, layout: Layout) -> int:
    """Gradient elements in a reduction: the largest matrix of a layer, which is then reduced through the bucket and not
    alone, and as many as fill the link, as far as there is memory for them.

    DeepSpeed's own default, 5e8, holds 1 GB, twice with overlap.
    """
    return max(largest_layer_matrix(model), fills_the_link(cluster, layout))


def _prefetch_bucket(model: ModelSpec, cluster: ClusterSpec, layout: Layout) -> int:
    """Elements of weights under way: the next matrix; more, up to a layer, where a matrix alone does not fill the link.
    DeepSpeed's default is 5e7."""
    return max(largest_layer_matrix(model), min(count(model).layer.total, fills_the_link(cluster, layout)))


def _live_parameters(model: ModelSpec, cluster: ClusterSpec) -> int:
    """Elements of weights that may stay gathered at once, and within which one that is used again is not released.

    A twentieth of the GPU's memory, in 16 bits: 1.1e9 on 40 GiB, 2.1e9 on 80 (DeepSpeed: 1e9 everywhere). At least the
    two layers that follow each other and what is largest, without which nothing computes.
    """
    least = 2 * count(model).layer.total + largest_parameter(model)
    return min(count(model).total, max(least, int(LIVE_SHARE * cluster.gpu.memory_gib * GIB / 2)))


def persistent_parameters(model: ModelSpec, threshold: int) -> int:
    """Elements of the matrices that are small enough to stay whole on every rank; norms and biases are not counted."""
    counts, hidden, layers = count(model), model.hidden_size, model.num_layers + model.encoder_layers
    keys, queries = (hidden * model.head_dim * n for n in (model.num_key_value_heads, model.num_attention_heads))
    matrices = (
        (keys, 2 * keys * layers),
        (queries, 2 * queries * layers),
        (hidden * model.mlp_width, counts.layer.mlp * layers),
        (hidden * model.vocab_size, counts.embedding + counts.head),
    )
    return sum(together for each, together in matrices if each <= threshold)


def _partition(elements: int, layout: Layout) -> int:
    """Elements of a parameter that one rank keeps in stage 3, padded so that ranks are equal."""
    return -(-elements // (layout.dp * layout.cp))


def least_param_buffer(model: ModelSpec, layout: Layout) -> int:
    """Elements of a buffer through which weights go to NVMe: a rank's part of the largest weight.

    Larger ones stop the run (partitioned_param_swapper.py, get_buffer), so this is the least that works.
    """
    return _partition(largest_parameter(model), layout)


def _sub_group_size(layout: Layout) -> int:
    """Parameters of a rank that are read, stepped and written at a time where NVMe is involved."""
    if layout.offload_param != "nvme":
        return NVME_SUB_GROUP
    return min(NVME_SUB_GROUP, max(LEAST_NVME_SUB_GROUP, NVME_SUB_GROUP_OF_ALL_RANKS // layout.dp))


def largest_sub_group(model: ModelSpec, layout: Layout, sub_group_size: int) -> int:
    """Elements in the largest sub group: a group is closed by the parameter that reaches the size asked for
    (stage3.py, _create_fp16_sub_groups), so it may exceed it by that one."""
    share = _partition(count(model).total, layout)
    return min(share, sub_group_size + least_param_buffer(model, layout))

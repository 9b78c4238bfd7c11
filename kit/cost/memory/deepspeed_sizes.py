"""Sizes of DeepSpeed's buffers, in elements: the pinned values, or kit's choice from model, cluster and layout.

The plan states the sizes, kit/emit writes them, and the cost model counts their memory. DeepSpeed's defaults
(5e8-element buckets, 1e9-element sub groups, 1e8-element NVMe buffers) fit one size of model and one size of GPU.
"""

from __future__ import annotations

import math

from kit.cost.collectives import fills_the_link
from kit.cost.hardware import overheads, shared, usable_gib
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.specs.cluster import ClusterSpec
from kit.specs.layout import ZERO_KEYS, Layout
from kit.specs.model import ModelSpec
from kit.units import GIB

NVME_BLOCK_BYTES = 1024**2
"""Bytes of one disk request. DeepSpeed never swaps a tensor below 1 MiB (swap_tensor/utils.py, MIN_AIO_BYTES): norms
and biases stay in host memory."""
NVME_SUB_GROUP = 100_000_000
"""Parameters per sub group of a rank with the optimizer on NVMe. Reads of 400 MB are bound by bandwidth, not latency;
four pinned buffers take 1.6 GB. DeepSpeed's default, 1e9, would pin 16 GB on every rank."""
NVME_SUB_GROUP_OF_ALL_RANKS = 800_000_000
"""Parameters per sub group over all ranks, with weights on NVMe. Each rank then pins a buffer for the full weights of a
sub group, not only for its shard (stage3.py, largest_partition_numel uses ``ds_numel`` of parameters, not of
partitions)."""
LEAST_NVME_SUB_GROUP = 10_000_000
"""Smallest sub group: reads of 40 MB are still bound by bandwidth."""
_OPTIMIZER_BUFFERS = 4
"""Host buffers of the optimizer: master weights, gradient and two moments (partitioned_optimizer_swapper.py,
swap_in_optimizer_state: one buffer per state tensor and one for gradients)."""
_PARAM_BUFFERS = 5
"""Host buffers of weights: one for the matrix that is being gathered, four for the next matrices, which are prefetched
(partitioned_param_coordinator.py, __prefetch_nvme_param_partitions)."""

LIVE_SHARE = 0.05
"""Share of a GPU's memory for gathered weights."""
NVME_LATENCY_S = 100e-6
"""Assumed latency of a read from a data-centre NVMe drive (order of magnitude). ``ds_nvme_tune`` measures a machine's
best values; kit's values keep a faster disk busy too."""
NVME_BYTES_PER_THREAD_S = 2e9
"""Assumed rate of one thread with direct I/O: below one drive's rate, so that a drive gets two threads."""


def buffer_sizes(model: ModelSpec, cluster: ClusterSpec, layout: Layout) -> dict[str, int]:
    """``Layout`` field → size in elements, for each buffer that the ZeRO stage and the offload use. A pinned size
    replaces kit's choice."""
    chosen: dict[str, int] = {}
    stage = layout.zero_stage if layout.engine == "deepspeed" else 0
    if stage > 0:
        # Gradient elements per reduction: enough to fill the link, and at least a layer's largest matrix, so that it is
        # reduced through the bucket. DeepSpeed's default, 5e8, takes 1 GB, and twice that with overlap_comm.
        matrix, fills = largest_layer_matrix(model), fills_the_link(cluster, layout)
        chosen["reduce_bucket_size"] = max(matrix, fills)
    if stage == 3:
        # One matrix, or more (up to a layer) if one does not fill the link. DeepSpeed's default is 5e7.
        chosen["stage3_prefetch_bucket_size"] = max(matrix, min(count(model).layer.total, fills))
        chosen["stage3_max_live_parameters"] = live_parameters(model, cluster)
        # Norms and biases (a few hidden sizes each) are not sharded: gathering them costs only latency. Matrices are
        # larger than this threshold.
        chosen["stage3_param_persistence_threshold"] = 10 * model.hidden_size
    if layout.uses_nvme:
        chosen["sub_group_size"] = _sub_group_size(layout)
    if layout.offload_optimizer == "nvme":
        chosen["optimizer_buffer_count"] = _OPTIMIZER_BUFFERS
    if layout.offload_param == "nvme":
        chosen |= {"param_buffer_count": _PARAM_BUFFERS, "param_buffer_size": least_param_buffer(model, layout)}
    return chosen | {name: size for name in ZERO_KEYS if (size := getattr(layout, name)) is not None}


def nvme_queue_depth(cluster: ClusterSpec) -> int:
    """Disk requests in flight per rank: four times what the rank's share of the disks delivers within one latency, as a
    power of two from 8 to 128."""
    share = _disk_bytes_per_s(cluster) / cluster.gpus_per_node
    needed = 4 * share * NVME_LATENCY_S / NVME_BLOCK_BYTES
    return int(min(128, max(8, 2 ** math.ceil(math.log2(needed)))))


def nvme_threads(cluster: ClusterSpec) -> int:
    """Threads per rank that submit disk requests: as many as the rank's share of the disks needs, at most 8."""
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
    """Elements of the model's largest parameter: the embedding for most dense models; for a mixture of experts the
    gate_up_proj of a layer, which transformers stores as one parameter for all experts."""
    experts = model.num_experts * 2 * model.moe_ffn_hidden_size * model.hidden_size
    return max(largest_layer_matrix(model), model.vocab_size * model.hidden_size, experts)


def live_parameters(model: ModelSpec, cluster: ClusterSpec) -> int:
    """Weight elements that may be gathered at once; also the reuse distance within which a weight is not released.

    A twentieth of the GPU's memory in 16 bits: 1.1e9 on 40 GiB, 2.1e9 on 80 GiB (DeepSpeed's default: 1e9). At least
    two layers and the largest parameter.
    """
    least = 2 * count(model).layer.total + largest_parameter(model)
    return min(count(model).total, max(least, int(LIVE_SHARE * cluster.gpu.memory_gib * GIB / 2)))


def persistent_parameters(model: ModelSpec, threshold: int) -> int:
    """Elements of the matrices of at most ``threshold`` elements, which ZeRO-3 does not shard; without norms and
    biases."""
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
    """Elements of one rank's shard of a parameter at stage 3, padded to equal shards."""
    return -(-elements // layout.dense_dp)


def least_param_buffer(model: ModelSpec, layout: Layout) -> int:
    """Elements of an NVMe weight buffer: a rank's shard of the largest parameter.

    DeepSpeed stops if a shard is larger than the buffer (partitioned_param_swapper.py, get_buffer).
    """
    return _partition(largest_parameter(model), layout)


def _sub_group_size(layout: Layout) -> int:
    """Parameters of a rank that NVMe offload reads, steps and writes at a time."""
    if layout.offload_param != "nvme":
        return NVME_SUB_GROUP
    return min(NVME_SUB_GROUP, max(LEAST_NVME_SUB_GROUP, NVME_SUB_GROUP_OF_ALL_RANKS // layout.dp))


def largest_sub_group(model: ModelSpec, layout: Layout, sub_group_size: int) -> int:
    """Elements of the largest sub group. It ends with the parameter that reaches ``sub_group_size`` and so may exceed
    the size by one parameter (stage3.py, _create_fp16_sub_groups)."""
    share = _partition(count(model).total, layout)
    return min(share, sub_group_size + least_param_buffer(model, layout))


def unsharded_bytes(workload: Workload) -> float:
    """Bytes of a rank's weights below stage 3."""
    return (4.0 if workload.autocast else workload.weight_bytes) * workload.parameters[0].total


def fits_twice(workload: Workload) -> bool:
    """Whether a GPU has room for its unsharded weights twice."""
    room = usable_gib(workload.cluster.gpu) - overheads().context_gib
    return 2 * unsharded_bytes(workload) <= room * GIB


def owns_weights(workload: Workload) -> bool:
    """Whether weights have memory of their own when DeepSpeed's stages 1 and 2 copy them into a flat buffer. kit's
    engine gives it weights that share memory; TRL's trainers and AutoTP's slices are others
    (kit/engines/deepspeed/whole_model.py)."""
    return workload.trl is not None or (workload.layout.tp > 1 and workload.layout.implementation == "huggingface")


def flattens_on_host(workload: Workload) -> bool:
    """Whether that copy is made in host memory, because the GPU has no room for the weights twice (stage_1_and_2.py,
    flatten_on_accelerator)."""
    flattened = workload.layout.engine == "deepspeed" and workload.layout.zero_stage in (1, 2)
    return flattened and workload.job.lora is None and owns_weights(workload) and not fits_twice(workload)

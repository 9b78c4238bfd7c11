"""Sizes that kit writes into ds_config.json, in elements: the emitter writes, the cost model counts.

Each follows from the model and the layout. DeepSpeed's own defaults (5e8-element buckets, 1e9-element sub groups,
1e8-element NVMe buffers) fit one size of model and one size of GPU.
"""

from __future__ import annotations

from kit.cost.params import count
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

NVME_BLOCK_BYTES = 1024**2
"""One request to the disk. DeepSpeed swaps only what is at least this large, and never less than 1 MiB
(swap_tensor/utils.py, MIN_AIO_BYTES): norms and biases stay in host memory."""
NVME_SUB_GROUP = 100_000_000
"""Parameters of a rank that are stepped at a time with the optimizer on NVMe: a read of 400 MB is bandwidth, not
latency, and four pinned buffers of it are 1.6 GB. DeepSpeed's default, 1e9, would pin 16 GB on every rank."""
NVME_SUB_GROUP_OF_ALL_RANKS = 800_000_000
"""The same over all ranks, with weights on NVMe: each rank then pins a buffer for the whole weights of a sub group, not
for its part of them (stage3.py, largest_partition_numel takes ``ds_numel`` of parameters, not of partitions)."""
LEAST_NVME_SUB_GROUP = 10_000_000
"""Reads of 40 MB are bandwidth still."""
OPTIMIZER_BUFFERS = 4
"""A master, its gradient and two moments are in host memory at once (partitioned_optimizer_swapper.py,
swap_in_optimizer_state: one buffer per state tensor and one for gradients)."""
PARAM_BUFFERS = 5
"""A module of a transformer has one matrix, which is being gathered; the four that follow are read meanwhile
(partitioned_param_coordinator.py, __prefetch_nvme_param_partitions, as far as buffers are free)."""


def largest_layer_matrix(model: ModelSpec) -> int:
    """Elements of the largest weight inside a transformer layer (embeddings are outside)."""
    return model.hidden_size * max(model.mlp_width, model.num_attention_heads * model.head_dim)


def largest_parameter(model: ModelSpec) -> int:
    """Elements of the largest weight of all: the embedding for most dense models, and for a mixture of experts a
    layer's gate and up projections of all experts, which transformers holds as one parameter (gate_up_proj)."""
    experts = model.num_experts * 2 * model.moe_ffn_hidden_size * model.hidden_size
    return max(largest_layer_matrix(model), model.vocab_size * model.hidden_size, experts)


def reduce_bucket(model: ModelSpec, layout: Layout) -> int:
    """Gradient elements in a reduction.

    At least the largest matrix of a layer, which is then reduced through the bucket and not alone; and a million per
    rank, so that a rank's share is bandwidth and not latency (megatron-core takes max(40e6, 1e6·dp):
    distributed_data_parallel_config.py, bucket_size). DeepSpeed's own default, 5e8, holds 1 GB, twice with overlap.
    """
    return max(largest_layer_matrix(model), 1_000_000 * layout.dp)


def partition(elements: int, layout: Layout) -> int:
    """Elements of a parameter that one rank keeps in stage 3, padded so that ranks are equal."""
    return -(-elements // layout.dp)


def nvme_param_buffer(model: ModelSpec, layout: Layout) -> int:
    """Elements of a buffer through which weights go to NVMe: a rank's part of the largest weight.

    Larger ones stop the run (partitioned_param_swapper.py, get_buffer), so this is the least that works.
    """
    return partition(largest_parameter(model), layout)


def sub_group_size(layout: Layout) -> int:
    """Parameters of a rank that are read, stepped and written at a time where NVMe is involved."""
    if layout.offload_param != "nvme":
        return NVME_SUB_GROUP
    return min(NVME_SUB_GROUP, max(LEAST_NVME_SUB_GROUP, NVME_SUB_GROUP_OF_ALL_RANKS // layout.dp))


def largest_sub_group(model: ModelSpec, layout: Layout) -> int:
    """Elements in the largest sub group: a group is closed by the parameter that reaches the size asked for
    (stage3.py, _create_fp16_sub_groups), so it may exceed it by that one."""
    share = partition(count(model).total, layout)
    return min(share, sub_group_size(layout) + nvme_param_buffer(model, layout))

"""Host memory and NVMe space of offload, by any engine: bytes per parameter on a rank, and GiB per node.

Megatron's optimizer offload: megatron-core 0.16.1, optimizer/cpu_offloading/hybrid_optimizer.py.
DeepSpeed 0.19: runtime/zero/stage3.py (_create_fp32_partitions, initialize_optimizer_states,
_setup_for_real_optimizer), stage_1_and_2.py, and runtime/swap_tensor for NVMe: ZeRO-Infinity (arXiv 2104.07857).
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from kit.cost.hardware import overheads
from kit.cost.memory import deepspeed_sizes
from kit.cost.memory.activations_huggingface import layer_input
from kit.cost.memory.states import moment_bytes, quantised, weight_element
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.specs.job import Precision
from kit.specs.layout import Layout
from kit.units import to_gib

PINNED_ROUNDING = 1.5
"""Allocated over requested pinned memory. torch rounds pinned blocks up to a power of two, a factor of 1 to 2
(aten/src/ATen/core/CachingHostAllocator.h); DeepSpeed's own estimate uses 1.5 (stage3.py,
estimate_zero3_model_states_mem_needs). NVMe buffers are not rounded (csrc/aio, deepspeed_pin_tensor.cpp)."""

HOST_SHARE = 0.9
"""Share of a node's host memory that offload may take. The system, the page cache and the data loader need the rest."""


class OffloadedBytes(NamedTuple):
    """Bytes per model parameter that one rank offloads from its device."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Master weights and both moments."""

    @property
    def total(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


def host_state_bytes(layout: Layout, precision: Precision, frozen: bool = False) -> OffloadedBytes:
    """Bytes per parameter in host memory on one rank, without NVMe buffers. Gradients are stored twice: summed over
    micro batches, and in fp32 for the optimizer. At stage 3 the sum is in host memory even if the optimizer is on NVMe
    (stage3.py, grad_partitions_flat_buffer). ``frozen``: whether the weights are, and adapters are trained."""
    element = weight_element(layout, precision)
    if layout.engine == "torch":
        if layout.offload_param == "none":
            return OffloadedBytes()
        # Weights are their own masters; adapters, in fp32, are counted with their moments.
        each, masters = 1 / layout.dense_dp, layout.master_bytes
        state = 12.0 if frozen else moment_bytes(layout).rest
        gradients = 2.0 if not frozen and "bf16" in (layout.gradient_dtype, layout.optimizer_state_dtype) else 4.0
        return OffloadedBytes((element if frozen else masters) * each, gradients * each, state * each)
    if layout.engine == "megatron":
        if layout.offload_optimizer == "none":
            return OffloadedBytes()
        # Bytes per parameter that the rank's optimizer steps: a copy of the reduced gradient, masters and moments.
        share = layout.optimizer_offload_fraction
        return OffloadedBytes(gradients=4.0 * share, optimizer=12.0 * share)
    accumulates = layout.gradient_accumulation_steps > 1
    weights = element / layout.dense_dp if layout.offload_param == "cpu" else 0.0
    if layout.offload_optimizer == "none":
        return OffloadedBytes(weights=weights)
    if layout.zero_stage < 3:
        # Updated weights have another host copy until the all-gather (param_buffer_of_bit16_for_cpu_offload_groups).
        # Stage 2 sums fp32 gradients in host memory (accumulated_grads_in_cpu), bf16 gradients on the device.
        weights += element / layout.dense_dp
        summed = 4.0 if accumulates and precision == "fp32" and layout.zero_stage == 2 else 0.0
    else:
        summed = 4.0 if accumulates else element
    in_host = layout.offload_optimizer == "cpu"
    masters = layout.master_bytes  # the optimizer's gradient has their dtype
    return OffloadedBytes(
        weights=weights,
        gradients=(summed + (masters if in_host else 0.0)) / layout.dense_dp,
        optimizer=(masters + moment_bytes(layout).rest) / layout.dense_dp if in_host else 0.0,
    )


def nvme_state_bytes(layout: Layout, precision: Precision) -> OffloadedBytes:
    """Bytes per parameter on NVMe on one rank. fp32 gradients, master weights, moments and weights each have a file."""
    optimizer = layout.offload_optimizer == "nvme"
    return OffloadedBytes(
        weights=weight_element(layout, precision) / layout.dense_dp if layout.offload_param == "nvme" else 0.0,
        gradients=4.0 / layout.dense_dp if optimizer else 0.0,
        optimizer=12.0 / layout.dense_dp if optimizer else 0.0,
    )


def host_buffer_bytes(workload: Workload) -> float:
    """Bytes of host buffers on one rank: for gradients at stages 1 and 2, and for transfers to NVMe.

    Optimizer on NVMe: buffers of the largest sub group (swap_tensor/optimizer_utils.py, SwapBufferManager). Weights on
    NVMe: buffers of ``param_buffer_size`` elements (partitioned_param_swapper.py, _configure_aio), and one for the full
    weights of the largest sub group, from which updated weights are written (reserve_partitioned_swap_space).
    """
    model, layout = workload.model, workload.layout
    element = weight_element(layout, workload.job.precision)
    sizes = deepspeed_sizes.buffer_sizes(model, workload.cluster, layout)
    total, group = 0.0, 0
    if layout.uses_nvme:
        group = deepspeed_sizes.largest_sub_group(model, layout, sizes["sub_group_size"])
    if layout.offload_optimizer == "cpu" and layout.zero_stage < 3:
        total += element * deepspeed_sizes.largest_parameter(model)  # temp_grad_buffer_for_cpu_offload
    if layout.offload_optimizer == "nvme":
        total += sizes["optimizer_buffer_count"] * 4.0 * group
    if layout.offload_param == "nvme":
        total += sizes["param_buffer_count"] * element * sizes["param_buffer_size"]
        total += element * group * layout.dense_dp
    return total


def host_ram_gib_per_node(workload: Workload) -> float:
    """GiB of host memory that offload takes on each node. Frozen weights have neither gradients nor optimizer state."""
    cluster, layout, precision = workload.cluster, workload.layout, workload.job.precision
    if layout.engine == "megatron" and layout.offload_optimizer == "none":
        return 0.0
    states = host_state_bytes(layout, precision, workload.job.lora is not None)
    # Stages 1 and 2 also pin master weights (stage_1_and_2.py, weights_partition). Stage 3's and Megatron's
    # master weights, and Adam's moments, are pageable.
    pins_masters = layout.zero_stage < 3 and layout.engine != "megatron"
    pinned = states.gradients + (states.optimizer / 3 if pins_masters else 0.0)
    of_trained = states.gradients + states.optimizer + (PINNED_ROUNDING - 1) * pinned
    if layout.engine == "megatron":
        # Pipeline ranks are the slowest to vary, so all ranks of a node may be of the fullest stage.
        stepped = max(workload.stepped_parameters(parameters) for parameters in workload.parameters)
        return to_gib(of_trained * stepped * cluster.gpus_per_node)
    of_weights = PINNED_ROUNDING * stored_weight_bytes(workload) / layout.dense_dp if states.weights else 0.0
    rank = (of_weights + of_trained * workload.trained_parameters) / layout.tp + host_buffer_bytes(workload)
    rank += offloaded_activation_bytes(workload, pinned=True)
    return to_gib(rank * layout.world_size / cluster.num_nodes) + _reference_gib_per_node(workload)


def offloaded_activation_bytes(workload: Workload, pinned: bool = False) -> float:
    """Bytes of saved layer inputs of one micro batch that a rank keeps in host memory. ``pinned``: with torch's
    rounding of a pinned block to a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""
    if not workload.layout.activation_offloading:
        return 0.0
    each = layer_input(workload)
    return workload.num_layers * (2.0 ** ceil(log2(each)) if pinned else each)


def stored_weight_bytes(workload: Workload) -> float:
    """Bytes of all weights as the host stores them: those of linear layers as codes, if they are quantised."""
    lora, element = workload.job.lora, weight_element(workload.layout, workload.job.precision)
    if lora is None and workload.layout.engine == "torch":
        element = float(workload.weight_bytes)
    total = count(workload.model).total
    if (base := quantised(lora)) is None:
        return element * total
    matrices = sum(parameters.dense_matrices for parameters in workload.parameters)
    return base.codes * matrices + element * (total - matrices)


def host_load_gib_per_node(workload: Workload) -> float:
    """GiB of host memory on a node while weights are loaded: offloaded state, one Python process per rank, and the
    largest parameter. Each rank loads one whole fp32 parameter at a time and then shards it (kit/engines,
    import_state). With adapters and tensor parallelism each rank of FSDP2 loads the whole model
    (kit/engines/torch/engine.py). Pretraining is taken to start from random weights: the first rank builds them.
    """
    model, cluster, layout = workload.model, workload.cluster, workload.layout
    ranks = layout.world_size / cluster.num_nodes
    reading = 4.0 * deepspeed_sizes.largest_parameter(model) / layout.tp
    if layout.engine == "torch" and layout.tp > 1 and workload.job.lora is not None:
        reading += stored_weight_bytes(workload)
    if deepspeed_sizes.flattens_on_host(workload):
        # Each parameter, and the flat copy of all (stage_1_and_2.py, cpu_data).
        reading += 2 * deepspeed_sizes.unsharded_bytes(workload)
    processes = ranks * (overheads().cpu_process_gib + to_gib(reading))
    # DDP builds them on its device, transformers on rank 0's under zero.Init, megatron-core's layers one by one.
    built = {"torch": layout.zero_stage > 0, "deepspeed": layout.zero_stage < 3}.get(layout.engine, False)
    built = built and layout.implementation == "huggingface" and workload.job.lora is None
    random = to_gib(4.0 * count(model).total) if built and workload.job.objective == "pretrain" else 0.0
    return host_ram_gib_per_node(workload) + processes + random


def nvme_gib_per_node(workload: Workload) -> float:
    """GiB on disk that offload takes on each node."""
    model, cluster, layout, precision = workload.model, workload.cluster, workload.layout, workload.job.precision
    share = nvme_state_bytes(layout, precision).total * count(model).total / layout.tp
    return to_gib(share * layout.world_size / cluster.num_nodes)


def _reference_gib_per_node(workload: Workload) -> float:
    """GiB of an offloaded reference model in a node's memory."""
    there = workload.holds_reference and workload.layout.offload_param != "none"
    return to_gib(there * workload.element * count(workload.model).total / workload.cluster.num_nodes)

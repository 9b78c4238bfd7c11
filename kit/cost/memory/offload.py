"""What DeepSpeed's offload keeps in host memory and on NVMe: bytes per parameter, and whole nodes.

DeepSpeed 0.19: runtime/zero/stage3.py (_create_fp32_partitions, initialize_optimizer_states,
_setup_for_real_optimizer), stage_1_and_2.py, and runtime/swap_tensor for NVMe: ZeRO-Infinity (arXiv 2104.07857).
"""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.hardware import overheads
from kit.cost.memory import deepspeed_sizes
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.specs.job import Precision
from kit.specs.layout import Layout
from kit.units import to_gib

PINNED_ROUNDING = 1.5
"""Page-locked blocks are rounded up to a power of two (torch, aten/src/ATen/core/CachingHostAllocator.h): 1 to 2.
DeepSpeed's own estimate takes 1.5 for all of it (stage3.py, estimate_zero3_model_states_mem_needs); buffers of NVMe
are allocated as large as they are (csrc/aio, deepspeed_pin_tensor.cpp)."""

HOST_SHARE = 0.9
"""Share of a node's host memory that offload may take. The system, the page cache and the data loader need the rest."""


class OffloadedBytes(NamedTuple):
    """Bytes per parameter of the model that one rank keeps away from its device."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """Master weights and both moments."""

    @property
    def total(self) -> float:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def _ranks(layout: Layout) -> int:
    """Ranks over which ZeRO shares out a parameter: sequence-parallel ones too."""
    return layout.dp * layout.cp


def _element(layout: Layout, precision: Precision) -> float:
    """Bytes of a weight as ZeRO holds it."""
    return 4.0 if precision == "fp32" or layout.autocast else 2.0


def host_state_bytes(layout: Layout, precision: Precision) -> OffloadedBytes:
    """State that one rank keeps in host memory, without NVMe buffers. Gradients are there twice: summed over micro
    batches, and in fp32 for the optimizer. In stage 3 the sum stays in host memory also with the optimizer on NVMe
    (stage3.py, grad_partitions_flat_buffer)."""
    element = _element(layout, precision)
    accumulates = layout.gradient_accumulation_steps > 1
    weights = element / _ranks(layout) if layout.offload_param == "cpu" else 0.0
    if layout.offload_optimizer == "none":
        return OffloadedBytes(weights=weights)
    if layout.zero_stage < 3:
        # Stepped weights wait for their gather in another copy (param_buffer_of_bit16_for_cpu_offload_groups). fp32
        # gradients are summed in host memory by stage 2 (accumulated_grads_in_cpu), bf16 ones on the device.
        weights += element / _ranks(layout)
        summed = 4.0 if accumulates and precision == "fp32" and layout.zero_stage == 2 else 0.0
    else:
        summed = 4.0 if accumulates else element
    in_host = layout.offload_optimizer == "cpu"
    return OffloadedBytes(
        weights=weights,
        gradients=(summed + (4.0 if in_host else 0.0)) / _ranks(layout),
        optimizer=12.0 / _ranks(layout) if in_host else 0.0,
    )


def nvme_state_bytes(layout: Layout, precision: Precision) -> OffloadedBytes:
    """State that one rank keeps on NVMe. fp32 gradients, master weights, moments and weights each have a file."""
    optimizer = layout.offload_optimizer == "nvme"
    return OffloadedBytes(
        weights=_element(layout, precision) / _ranks(layout) if layout.offload_param == "nvme" else 0.0,
        gradients=4.0 / _ranks(layout) if optimizer else 0.0,
        optimizer=12.0 / _ranks(layout) if optimizer else 0.0,
    )


def host_buffer_bytes(workload: Workload) -> float:
    """What passes through host memory on one rank: gradients of stages 1 and 2, and everything that goes to NVMe.

    Optimizer: buffers of the largest sub group (swap_tensor/optimizer_utils.py, SwapBufferManager). Weights: buffers of
    the largest weight's part (partitioned_param_swapper.py, _configure_aio), and one for the whole weights of the
    largest sub group, from which stepped ones are written (reserve_partitioned_swap_space).
    """
    model, layout = workload.model, workload.layout
    element = _element(layout, workload.job.precision)
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
        total += element * group * _ranks(layout)
    return total


def host_ram_gib_per_node(workload: Workload) -> float:
    """Host memory that offload takes on each node. What is frozen has neither gradients nor optimizer state."""
    model, cluster, layout, precision = workload.model, workload.cluster, workload.layout, workload.job.precision
    states = host_state_bytes(layout, precision)
    # Masters too (stage_1_and_2.py, weights_partition); stage 3 leaves them pageable, as Adam leaves its moments.
    pinned = states.gradients + (states.optimizer / 3 if layout.zero_stage < 3 else 0.0)
    of_trained = states.gradients + states.optimizer + (PINNED_ROUNDING - 1) * pinned
    of_weights = PINNED_ROUNDING * states.weights * count(model).total
    rank = (of_weights + of_trained * workload.trained_parameters) / layout.tp + host_buffer_bytes(workload)
    return to_gib(rank * layout.world_size / cluster.num_nodes)


def host_load_gib_per_node(workload: Workload) -> float:
    """Host memory of a node while weights are read: what offload keeps from the start, a Python process a rank, and the
    largest parameter, which a rank has whole and in fp32 before it is cut (kit/engines, import_state: one at a time).
    """
    model, cluster, layout = workload.model, workload.cluster, workload.layout
    ranks = layout.world_size / cluster.num_nodes
    reading = 4.0 * deepspeed_sizes.largest_parameter(model) / layout.tp
    return host_ram_gib_per_node(workload) + ranks * (overheads().cpu_process_gib + to_gib(reading))


def nvme_gib_per_node(workload: Workload) -> float:
    """Disk that offload takes on each node."""
    model, cluster, layout, precision = workload.model, workload.cluster, workload.layout, workload.job.precision
    share = nvme_state_bytes(layout, precision).total * count(model).total / layout.tp
    return to_gib(share * layout.world_size / cluster.num_nodes)

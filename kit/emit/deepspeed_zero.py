"""The ``zero_optimization``, ``aio`` and ``data_types`` sections of ds_config.json, as DeepSpeed 0.19.8 reads them."""

from __future__ import annotations

from typing import Any

from kit.cost import deepspeed_sizes as sizes
from kit.planner.plan import Plan


def zero_section(plan: Plan) -> dict[str, Any]:
    """What the stage reads, and nothing else."""
    layout, stage = plan.layout, plan.layout.zero_stage
    if stage == 0:
        return {"stage": 0}
    bucket = sizes.reduce_bucket(plan.model, plan.cluster, layout)
    zero: dict[str, Any] = {
        "stage": stage,
        # Reduce a bucket while backward computes the next. CPU processes have no streams: only a second buffer.
        "overlap_comm": plan.cluster.gpu.device == "cuda",
        # Gradients of a bucket lie side by side, and are sent without a copy into a new buffer.
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
    }
    if stage < 3:
        # Elements gathered at once after a step; the same message size serves. Even, as stage_1_and_2.py asserts.
        zero["allgather_bucket_size"] = bucket + bucket % 2
    else:
        zero |= _stage3(plan)
    return zero | _offload(plan)


def accumulation_dtype(plan: Plan) -> str | None:
    """The dtype in which gradients are summed over micro batches, where DeepSpeed's own choice is not it.

    Its choice is the model's dtype (engine.py, get_data_types): 16-bit sums lose a micro batch's share once the sum is
    256 times larger, fp16 ones overflow. With more than one micro batch they are summed in fp32: 4 bytes per parameter
    instead of 2, spread over ranks in stages 2 and 3; in stage 1 (BF16_Optimizer) whole on each rank, beside the bf16
    gradients. Stage 0 has no such choice: DeepSpeed refuses it (engine.py, _do_optimizer_sanity_check).
    """
    layout = plan.layout
    sixteen_bit = plan.job.precision != "fp32" and not layout.autocast
    return "fp32" if sixteen_bit and layout.zero_stage >= 1 and layout.gradient_accumulation_steps > 1 else None


def _stage3(plan: Plan) -> dict[str, Any]:
    model, cluster, layout = plan.model, plan.cluster, plan.layout
    zero: dict[str, Any] = {
        # The next weights are on their way while these are multiplied.
        "stage3_prefetch_bucket_size": sizes.prefetch_bucket(model, cluster, layout),
        # Norms and biases (a few hidden sizes each) stay whole: gathering them is latency alone. No matrix is so small.
        "stage3_param_persistence_threshold": 10 * model.hidden_size,
        # What may stay gathered, so that backward finds the last layers of forward still there.
        "stage3_max_live_parameters": sizes.live_parameters(model, cluster, layout),
        "stage3_max_reuse_distance": sizes.live_parameters(model, cluster, layout),
        # Without it save_16bit_model writes empty tensors (engine.py, _zero3_consolidated_16bit_state_dict).
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if layout.zero_hpz > 1:
        zero["zero_hpz_partition_size"] = layout.zero_hpz
    if layout.zero_quantized_weights:
        zero["zero_quantized_weights"] = True
    if layout.zero_quantized_gradients:
        zero["zero_quantized_gradients"] = True
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        # What is stepped, read and written at a time, and what the pinned buffers hold.
        zero["sub_group_size"] = sizes.sub_group_size(layout)
    if layout.offload_param == "nvme":
        # A gathered weight keeps its swap buffer until it is released, and all that is used again within this distance
        # stays: with DeepSpeed's default, 1e9, the first forward pass ends with "Not enough buffers".
        zero["stage3_max_reuse_distance"] = 0
    return zero


def _offload(plan: Plan) -> dict[str, Any]:
    """Where state goes. The directory on NVMe is the run's, not the plan's: the engine adds it (run.nvme_path)."""
    layout = plan.layout
    # Page-locked memory is what a GPU's copy engines need; a CPU process would only lock it away.
    pin_memory = plan.cluster.gpu.device == "cuda"
    zero: dict[str, Any] = {}
    if layout.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": layout.offload_optimizer, "pin_memory": pin_memory}
    if layout.offload_optimizer == "nvme":
        zero["offload_optimizer"]["buffer_count"] = sizes.OPTIMIZER_BUFFERS
    if layout.offload_param != "none":
        zero["offload_param"] = {"device": layout.offload_param, "pin_memory": pin_memory}
    if layout.offload_param == "nvme":
        zero["offload_param"] |= {
            "buffer_count": sizes.PARAM_BUFFERS,
            "buffer_size": sizes.nvme_param_buffer(plan.model, layout),
            # How many parameters may stay in host memory after all; DeepSpeed's default, 1e9, keeps most models there.
            "max_in_cpu": 0,
        }
    return zero


def aio_section(plan: Plan) -> dict[str, Any]:
    """How the asynchronous I/O library reads and writes.

    Requests of 1 MiB, handed over in batches and reaped as they complete; as many in flight as the disks need, by as
    many threads as keep them busy (``kit.cost.deepspeed_sizes``). CPU rehearsals share two cores.
    """
    return {
        "block_size": sizes.NVME_BLOCK_BYTES,
        "queue_depth": sizes.nvme_queue_depth(plan.cluster),
        "intra_op_parallelism": sizes.nvme_threads(plan.cluster),
        "single_submit": False,
        "overlap_events": True,
    }

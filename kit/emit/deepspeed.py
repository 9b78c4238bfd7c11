"""``ds_config.json``: what ``deepspeed.initialize(config=…)`` reads. Checked against DeepSpeed 0.19.8.

Only keys that the chosen stage reads are written; everything else keeps DeepSpeed's default. DeepSpeed ignores
an unknown top-level key silently, so a test compares the keys written here with those its source reads.
"""

from __future__ import annotations

from typing import Any

from kit.cost import deepspeed_sizes as sizes
from kit.planner.plan import Plan

GUARDED: dict[str, str] = {
    "train_batch_size": "job.global_batch_size",
    "train_micro_batch_size_per_gpu": "layout.micro_batch_size",
    "gradient_accumulation_steps": "layout.micro_batch_size",
    "zero_optimization.stage": "layout.zero_stage",
    "zero_optimization.offload_optimizer.device": "layout.offload_optimizer",
    "zero_optimization.offload_param.device": "layout.offload_param",
    "bf16.enabled": "job.precision",
    "fp16.enabled": "job.precision",
    "gradient_clipping": "job.grad_clip",
    "optimizer.type": "job.optimizer.name",
    "optimizer.params.lr": "job.learning_rate",
    "optimizer.params.betas": "job.optimizer",
    "optimizer.params.eps": "job.optimizer.eps",
    "optimizer.params.weight_decay": "job.optimizer.weight_decay",
    "scheduler.type": "run.schedule",
    "tensor_parallel.autotp_size": "layout.tp",
    "sequence_parallel_size": "layout.sp",
}
"""Dotted key → recipe key that decides it. The ones never emitted would add parallelism, a precision or a schedule."""


def ds_config(plan: Plan) -> dict[str, Any]:
    """The configuration of a DeepSpeed plan; plain JSON values, the same for the same plan."""
    layout, job = plan.layout, plan.job
    config: dict[str, Any] = {
        # DeepSpeed asserts: the first is the product of the others and the world size (config.py, _batch_assertion).
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "optimizer": {"type": "AdamW", "params": _adamw(plan)},
        "gradient_clipping": job.grad_clip,
        "zero_optimization": _zero(plan),
    }
    if job.precision == "bf16":
        config |= _bf16(plan)
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        config["aio"] = _aio(plan)
    # The training loop logs. DeepSpeed's timers synchronise the device around every phase, and its progress line would
    # be a second log: null turns it off (engine.py, _take_model_step).
    return config | {"wall_clock_breakdown": False, "steps_per_print": None}


def _adamw(plan: Plan) -> dict[str, Any]:
    """Decay of matrices; the engine puts one-dimensional parameters into a group of their own without decay.

    The rate is a placeholder: the training loop sets it before every step, and no scheduler is configured.
    """
    optimizer = plan.job.optimizer
    params: dict[str, Any] = {
        "lr": plan.job.learning_rate,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if _torch_adam(plan):
        params["torch_adam"] = True
    return params


def _torch_adam(plan: Plan) -> bool:
    """Whether torch's AdamW runs instead of DeepSpeed's FusedAdam, or its CPU Adam under offload.

    On a CPU both would be compiled at first use (about 35 and 50 s), for the same result. Without ZeRO in bf16
    FusedAdam selects an optimizer that flattens all master weights (engine.py, _configure_fp16_optimizer);
    torch's keeps one per parameter.
    """
    return plan.cluster.gpu.device == "cpu" or (plan.job.precision == "bf16" and plan.layout.zero_stage == 0)


def _bf16(plan: Plan) -> dict[str, Any]:
    """bf16 weights and gradients, fp32 master weights and moments.

    ``check_grad_overflow`` stays at its default, true: DeepSpeed skips a step with a non-finite gradient, and the
    engine reports it. Gradients are **accumulated in bf16 by default** (engine.py, get_data_types: in the model's
    dtype), which loses a micro batch's share once the sum is 256 times larger. With more than one micro batch they
    are accumulated in fp32: 4 bytes per parameter instead of 2, spread over dp ranks in stages 2 and 3; in stage 1
    (BF16_Optimizer) whole on each rank, beside the bf16 gradients. Stage 0 has no such choice: DeepSpeed refuses it
    (engine.py, _do_optimizer_sanity_check). Gradients travel in bf16 either way, as the ZeRO paper counts them.
    """
    config: dict[str, Any] = {"bf16": {"enabled": True}}
    if plan.layout.zero_stage >= 1 and plan.layout.gradient_accumulation_steps > 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _zero(plan: Plan) -> dict[str, Any]:
    layout, stage = plan.layout, plan.layout.zero_stage
    if stage == 0:
        return {"stage": 0}
    bucket = sizes.reduce_bucket(plan.model, layout)
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


def _stage3(plan: Plan) -> dict[str, Any]:
    model, layout = plan.model, plan.layout
    zero: dict[str, Any] = {
        # The next matrix is on its way while this one is multiplied: as much look-ahead as the largest needs.
        "stage3_prefetch_bucket_size": sizes.largest_layer_matrix(model),
        # Norms and biases (a few hidden sizes each) stay whole: gathering them is latency alone. No matrix is so small.
        "stage3_param_persistence_threshold": 10 * model.hidden_size,
        # Without it save_16bit_model writes empty tensors (engine.py, _zero3_consolidated_16bit_state_dict).
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        # What is stepped, read and written at a time, and what the pinned buffers hold.
        zero["sub_group_size"] = sizes.sub_group_size(layout)
    if layout.offload_param == "nvme":
        # A gathered weight keeps its swap buffer until it is released, and with DeepSpeed's default, 1e9, all that is
        # used again within a billion parameters stays: the first forward pass ends with "Not enough buffers".
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


def _aio(plan: Plan) -> dict[str, Any]:
    """How the asynchronous I/O library reads and writes; starting values, ``ds_nvme_tune`` measures better ones.

    Requests of 1 MiB, many in flight, handed over in batches and reaped as they complete. Several threads a rank keep
    a striped array busy (DeepSpeed's DeepNVMe report used 8); CPU rehearsals share two cores.
    """
    return {
        "block_size": sizes.NVME_BLOCK_BYTES,
        "queue_depth": 32,
        "intra_op_parallelism": 4 if plan.cluster.gpu.device == "cuda" else 1,
        "single_submit": False,
        "overlap_events": True,
    }

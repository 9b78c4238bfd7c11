"""``ds_config.json``: what ``deepspeed.initialize(config=…)`` reads. Checked against DeepSpeed 0.19.8.

kit writes only keys that the ZeRO stage reads; all others keep DeepSpeed's default. DeepSpeed ignores an unknown
top-level key silently, so a test compares kit's keys with those that DeepSpeed's source reads.

kit does not write ``activation_checkpointing``. Only ``deepspeed.checkpointing.configure`` reads it
(runtime/activation_checkpointing/checkpointing.py), and Hugging Face models have their own recompute instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.cost.memory import deepspeed_sizes
from kit.emit.derived_file import DerivedFile, chosen, json_text
from kit.planner.plan import Plan
from kit.specs.extra import merged
from kit.specs.job import OptimizerName
from kit.specs.validation import thawed

PLAN_OWNED_KEYS: dict[str, str] = {
    "train_batch_size": "job.global_batch_size",
    "train_micro_batch_size_per_gpu": "layout.micro_batch_size",
    "gradient_accumulation_steps": "layout.micro_batch_size",
    "zero_optimization.stage": "layout.zero_stage",
    "zero_optimization.offload_optimizer.device": "layout.offload_optimizer",
    "zero_optimization.offload_param.device": "layout.offload_param",
    "zero_optimization.zero_hpz_partition_size": "layout.zero_hpz",
    "zero_optimization.zero_quantized_weights": "layout.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients": "layout.zero_quantized_gradients",
    "bf16.enabled": "job.precision",
    "bf16.bf16_master_weights_and_grads": "layout.optimizer_state_dtype",
    "bf16.bf16_optimizer_states": "layout.optimizer_state_dtype",
    "fp16.enabled": "job.precision",
    "torch_autocast.enabled": "layout.autocast",
    "torch_autocast.dtype": "job.precision",
    "communication_data_type": "layout.gradient_compression",
    "gradient_clipping": "job.grad_clip",
    "optimizer.type": "job.optimizer.name",
    "optimizer.params.lr": "job.learning_rate",
    "optimizer.params.betas": "job.optimizer",
    "optimizer.params.eps": "job.optimizer.eps",
    "optimizer.params.momentum": "job.optimizer.beta1",
    "optimizer.params.weight_decay": "job.optimizer.weight_decay",
    "scheduler.type": "run.schedule",
    "tensor_parallel.autotp_size": "layout.tp",
    "expert_parallel.enabled": "layout.ep",
    "sequence_parallel_size": "layout.cp",
}
"""Dotted key → recipe key that decides it. Keys that kit never writes are listed too, if they would add parallelism, a
precision or a schedule."""


def ds_config(plan: Plan) -> dict[str, Any]:
    """The configuration of a DeepSpeed plan; plain JSON values, the same for the same plan."""
    layout, job, optimizer = plan.layout, plan.job, _optimizer(plan)
    config: dict[str, Any] = {
        # DeepSpeed asserts: the first is the product of the others and the world size (config.py, _batch_assertion).
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        **chosen(("optimizer", optimizer, optimizer)),
        "gradient_clipping": job.grad_clip,
        "zero_optimization": _zero_section(plan),
    }
    config |= _precision(plan) | _parallelism(plan)
    if "tensor_parallel" in config:
        # DeepSpeed checks this key before AutoTP's groups exist. It would count every rank as data-parallel and refuse
        # the product (__init__.py, initialize). Without the key it computes the product itself.
        del config["train_batch_size"]
    dtype = _accumulation_dtype(plan)
    aio = {  # requests of 1 MiB, submitted in batches, with the depth and the threads that keep the disks busy
        "block_size": deepspeed_sizes.NVME_BLOCK_BYTES,
        "queue_depth": deepspeed_sizes.nvme_queue_depth(plan.cluster),
        "intra_op_parallelism": deepspeed_sizes.nvme_threads(plan.cluster),
        "single_submit": False,
        "overlap_events": True,
    }
    config |= chosen(
        ("data_types", dtype is not None, {"grad_accum_dtype": dtype}),
        ("communication_data_type", layout.gradient_compression != "none", layout.gradient_compression),
        ("aio", layout.uses_nvme, aio),
        # DeepSpeed asks for it with ZeRO and an optimizer that is not its own (engine.py, _do_optimizer_sanity_check).
        (
            "zero_allow_untested_optimizer",
            layout.zero_stage > 0 and (optimizer is None or job.optimizer.name == "sgd"),
            True,
        ),
    )
    # The training loop logs. DeepSpeed's timers synchronise the device around every phase, and its progress line would
    # be a second log: null turns it off (engine.py, _take_model_step).
    return merged(config | {"wall_clock_breakdown": False, "steps_per_print": None}, thawed(plan.extra.deepspeed))


def _optimizer(plan: Plan) -> dict[str, Any] | None:
    """The optimizer section (engine.py, _configure_basic_optimizer), with the weight decay of matrices; the engine puts
    one-dimensional parameters in a group without decay. None for 8-bit moments, which DeepSpeed does not have: the
    program passes that optimizer to ``deepspeed.initialize`` (kit/engines/deepspeed/eight_bit.py).

    The learning rate is a placeholder: the training loop sets it before every step, and no scheduler is configured.
    """
    optimizer = plan.job.optimizer
    betas = {"betas": [optimizer.beta1, optimizer.beta2]}
    own: dict[OptimizerName, tuple[str, dict[str, Any]]] = {
        "adamw": ("AdamW", betas | {"eps": optimizer.eps}),
        "sgd": ("SGD", {"momentum": optimizer.beta1}),
        "lion": ("Lion", betas),
        "adafactor": ("Adafactor", {}),
    }
    if optimizer.name not in own:
        return None
    kind, values = own[optimizer.name]
    params = {"lr": plan.job.learning_rate, **values, "weight_decay": optimizer.weight_decay}
    torch_adam = optimizer.name == "adamw" and _torch_adam(plan)
    return {"type": kind, "params": params | chosen(("torch_adam", torch_adam, True))}


def _torch_adam(plan: Plan) -> bool:
    """Whether torch's AdamW runs instead of DeepSpeed's FusedAdam, or its CPU Adam under offload (engine.py,
    get_optimizer_configuration).

    On a CPU, DeepSpeed would compile both at first use (about 35 and 50 s), for the same result. At stage 0 in 16 bits,
    FusedAdam selects an optimizer that flattens all master weights (engine.py, _configure_fp16_optimizer); torch's
    AdamW keeps one master weight per parameter. Offloaded bf16 master weights take DeepSpeedCPUAdam alone
    (stage_1_and_2.py, _enforce_cpu_offload).
    """
    if plan.layout.optimizer_state_dtype == "bf16" and plan.layout.offload_optimizer != "none":
        return False
    return plan.cluster.gpu.device == "cpu" or (plan.job.precision != "fp32" and plan.layout.zero_stage == 0)


def _precision(plan: Plan) -> dict[str, Any]:
    """16-bit weights and gradients with fp32 master weights and moments, unless the plan has those in bf16 too; or
    autocast over fp32 weights.

    bf16: ``check_grad_overflow`` has its default, true: DeepSpeed skips a step with a non-finite gradient, and the
    engine reports it. Gradients are reduced in 16 bits in any case, as the ZeRO paper counts them.
    """
    if plan.layout.autocast:
        # Only GEMMs run in bf16: norms, softmax and the residual stream stay fp32 (torch_autocast.py). Gradients of
        # matrices are reduced in bf16, other gradients in fp32.
        return {
            "torch_autocast": {
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],
            }
        }
    if plan.job.precision == "bf16":
        short = plan.layout.optimizer_state_dtype == "bf16"
        keys = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        return {"bf16": {"enabled": True} | chosen(*((key, short, True) for key in keys))}
    if plan.job.precision == "fp16":
        return {"fp16": _loss_scaling(plan)}
    return {}


def _loss_scaling(plan: Plan) -> dict[str, Any]:
    """Dynamic: start at 2^16, double after a window of clean steps, halve on overflow (fp16/loss_scaler.py).

    The window is a fiftieth of the run, from 50 to 1,000 steps; DeepSpeed's default of 1,000 is too long for a run of a
    few hundred steps. The steps of epochs are not known here, and few. One overflow does not change the scale
    (hysteresis 2), because it may come from one bad batch.
    """
    steps = (plan.job.total_tokens or 0) // plan.job.tokens_per_step
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": min(1000, max(50, steps // 50)),
        "hysteresis": 2,
        "min_loss_scale": 1,
    }


def _split(names: str, adapter: str, how: str) -> dict[str, Any]:
    return {"patterns": [rf".*\.({names})_proj(\.base_layer|\.{adapter}\.default)?\.weight$"], "partition_type": how}


# DeepSpeed's own plan does not know the names of peft's layers. It splits B of a column-parallel layer like the weight
# and A of a row-parallel layer; the other half is whole on every rank.
_ADAPTED_LAYERS = {
    "use_default_specs": False,
    "layer_specs": [_split("q|k|v|gate|up", "lora_B", "column"), _split("o|down", "lora_A", "row")],
}


def _parallelism(plan: Plan) -> dict[str, Any]:
    """AutoTP and Ulysses. ZeRO over Megatron needs an argument (``mpu``), not a key."""
    layout = plan.layout
    auto_tp = layout.tp > 1 and layout.implementation == "huggingface"
    # Every rank needs all logits, because the loss is computed outside of the model.
    adapted = chosen(("partition_config", plan.job.lora is not None, _ADAPTED_LAYERS))
    tensor_parallel = {"autotp_size": layout.tp, "vocab_parallel_lm_head": False, **adapted}
    return chosen(
        ("tensor_parallel", auto_tp, tensor_parallel),
        ("sequence_parallel_size", layout.cp > 1, layout.cp),
        # With sequence parallelism DeepSpeed reduces in fp32 by default (engine.py, _configure_distributed_model).
        ("seq_parallel_communication_data_type", layout.cp > 1, plan.job.precision),
    )


def _zero_section(plan: Plan) -> dict[str, Any]:
    """The ``zero_optimization`` section, with only the keys that the stage reads."""
    layout, stage = plan.layout, plan.layout.zero_stage
    if stage == 0:
        return {"stage": 0}
    sizes = deepspeed_sizes.buffer_sizes(plan.model, plan.cluster, layout)
    bucket = sizes["reduce_bucket_size"]
    zero: dict[str, Any] = {
        "stage": stage,
        # Reduce a bucket while backward computes the next. CPU processes have no streams: only a second buffer.
        "overlap_comm": plan.cluster.gpu.device == "cuda",
        # Gradients of a bucket are contiguous, and are sent without a copy into a new buffer.
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
    }
    # Elements gathered at once after a step; the same message size serves. Even, as stage_1_and_2.py asserts.
    own = {"allgather_bucket_size": bucket + bucket % 2} if stage < 3 else _stage3(plan, sizes)
    return zero | own | _offload(plan, sizes)


def _accumulation_dtype(plan: Plan) -> str | None:
    """dtype of the gradient sum over micro batches; None for DeepSpeed's default, the model's dtype (engine.py,
    get_data_types).

    A bf16 sum loses a micro batch's gradient once the sum is 256 times larger, and an fp16 sum overflows. So kit sums
    several micro batches in fp32: 4 bytes per parameter instead of 2. Stages 2 and 3 shard the sum. Stage 1
    (BF16_Optimizer) keeps it unsharded on each rank, in addition to the bf16 gradients. At stage 0 DeepSpeed refuses
    this key (engine.py, _do_optimizer_sanity_check).
    """
    layout = plan.layout
    sixteen_bit = plan.job.precision != "fp32" and not layout.autocast
    return "fp32" if sixteen_bit and layout.zero_stage >= 1 and layout.gradient_accumulation_steps > 1 else None


def _stage3(plan: Plan, sizes: Mapping[str, int]) -> dict[str, Any]:
    layout = plan.layout
    zero: dict[str, Any] = {
        # Prefetch the next weights during the GEMMs of the current ones.
        "stage3_prefetch_bucket_size": sizes["stage3_prefetch_bucket_size"],
        "stage3_param_persistence_threshold": sizes["stage3_param_persistence_threshold"],
        # Most weights that stay gathered, so that backward can reuse the last layers of forward.
        "stage3_max_live_parameters": sizes["stage3_max_live_parameters"],
        "stage3_max_reuse_distance": sizes["stage3_max_live_parameters"],
        # Without it save_16bit_model writes empty tensors (engine.py, _zero3_consolidated_16bit_state_dict).
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    return zero | chosen(
        ("zero_hpz_partition_size", layout.zero_hpz > 1, layout.zero_hpz),
        ("zero_quantized_weights", layout.zero_quantized_weights, True),
        ("zero_quantized_gradients", layout.zero_quantized_gradients, True),
        # Parameters that are stepped, read and written at a time; also the size of the pinned buffers.
        ("sub_group_size", "sub_group_size" in sizes, sizes.get("sub_group_size")),
        # A gathered weight keeps its swap buffer until its release, and DeepSpeed does not release weights that are
        # used again within this distance. With the default, 1e9, the first forward fails with "Not enough buffers".
        ("stage3_max_reuse_distance", layout.offload_param == "nvme", 0),
    )


def _offload(plan: Plan, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Offload sections. The directory on NVMe belongs to the run, not to the plan: the engine adds it
    (run.nvme_path)."""
    layout = plan.layout
    # A GPU's copy engines need pinned memory; CPU processes do not.
    pin_memory = plan.cluster.gpu.device == "cuda"
    optimizer = {"device": layout.offload_optimizer, "pin_memory": pin_memory} | chosen(
        ("buffer_count", layout.offload_optimizer == "nvme", sizes.get("optimizer_buffer_count"))
    )
    to_nvme = layout.offload_param == "nvme"
    param = {"device": layout.offload_param, "pin_memory": pin_memory} | chosen(
        ("buffer_count", to_nvme, sizes.get("param_buffer_count")),
        ("buffer_size", to_nvme, sizes.get("param_buffer_size")),
        # Parameters that may stay in host memory instead of NVMe; DeepSpeed's default, 1e9, keeps most models there.
        ("max_in_cpu", to_nvme, 0),
    )
    return chosen(
        ("offload_optimizer", layout.offload_optimizer != "none", optimizer),
        ("offload_param", layout.offload_param != "none", param),
    )


def runs_deepspeed(plan: Plan) -> bool:
    """Whether DeepSpeed trains the plan."""
    return plan.layout.engine == "deepspeed"


def with_nvme_path(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Fills in the disk that ``run.nvme_path`` names, because a plan does not know it."""
    named = {
        name: section | {"nvme_path": path}
        for name, section in config["zero_optimization"].items()
        if isinstance(section, dict) and section.get("device") == "nvme"
    }
    return config | {"zero_optimization": config["zero_optimization"] | named}


FILES = (DerivedFile("ds_config.json", lambda plan: json_text(ds_config(plan)), runs_deepspeed, PLAN_OWNED_KEYS),)

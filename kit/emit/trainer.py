"""``ds_config.trainer.json``: the same configuration for the Hugging Face Trainer, which fills in ``"auto"``.

The Trainer compares its arguments (batch, learning rate, Adam's values, clipping, precision) with the file and refuses
differences (transformers/integrations/deepspeed.py, trainer_config_process). So these keys are ``"auto"``, and
``training_arguments`` has the arguments that give the plan's values. Buffer sizes stay numbers: for bucket and prefetch
the Trainer would use h² and 0.9·h², less than a matrix of the MLP, and it never fills in allgather_bucket_size.
"""

from __future__ import annotations

from typing import Any

from kit.emit.deepspeed import ds_config, runs_deepspeed
from kit.emit.derived_file import DerivedFile, chosen, json_text
from kit.planner.plan import Plan
from kit.specs.job import TRL, GrpoSpec, JobSpec, OptimizerName

AUTO = "auto"


def for_trainer(plan: Plan) -> bool:
    """Whether the Trainer can run the plan: all ranks must be data-parallel, with Hugging Face layers."""
    layout = plan.layout
    return runs_deepspeed(plan) and layout.tp == layout.cp == 1 and layout.implementation == "huggingface"


OPTIM: dict[OptimizerName, str] = {
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "lion-8bit": "lion_8bit",
}
"""The Trainer's names (``optim``) of optimizers that a ds_config cannot name. It makes bitsandbytes' own, which have
norms in 8 bits too where ZeRO flattens them into 4,096 elements or more."""
_FILLED = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        "bf16.enabled",
        "fp16.enabled",
        "zero_optimization.stage3_param_persistence_threshold",
    }
)
"""Dotted keys that the Trainer fills in from its arguments."""


def trainer_config(plan: Plan) -> dict[str, Any]:
    """``ds_config(plan)`` with ``"auto"`` where the Trainer fills in the plan's value from its arguments."""
    return {key: _filled(key, value) for key, value in ds_config(plan).items()}


def _filled(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(f"{key}.{name}", inner) for name, inner in value.items()}
    return AUTO if key in _FILLED else value


def optim(plan: Plan) -> str | None:
    """The Trainer's name of the optimizer, where it is not torch's AdamW or the one of the ds_config."""
    return OPTIM.get(plan.job.optimizer.name)


def training_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` with which ``"auto"`` becomes the plan's values."""
    layout, job = plan.layout, plan.job
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "max_grad_norm": job.grad_clip,
        "learning_rate": job.learning_rate,
        "adam_beta1": job.optimizer.beta1,
        "adam_beta2": job.optimizer.beta2,
        "adam_epsilon": job.optimizer.eps,
        "weight_decay": job.optimizer.weight_decay,
    }
    return arguments | chosen(
        ("optim", optim(plan), optim(plan)),
        # The Trainer has no fp8: it computes in bf16.
        ("bf16" if job.precision == "fp8" else job.precision, job.precision != "fp32" and not layout.autocast, True),
        ("gradient_checkpointing", layout.recompute == "full", True),
        ("use_cpu", plan.cluster.gpu.device == "cpu", True),
        ("num_train_epochs", job.epochs, job.epochs),
        *_of_trl(job),
    )


def by_fsdp(plan: Plan) -> bool:
    """Whether accelerate shards the plan by FSDP2."""
    return plan.layout.engine == "torch" and plan.layout.zero_stage > 0


def script_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of a Trainer's script under accelerate.yaml. FSDP2's file has the recomputation, which the Trainer
    refuses to be told twice; and what joins FSDP2's ranks on CPUs (own_script.py) is not for ``use_cpu``, without which
    the Trainer refuses ``bf16`` there. accelerate.yaml has that too."""
    of_file = {"gradient_checkpointing"} if by_fsdp(plan) else set()
    of_file |= {"use_cpu", "bf16"} if by_fsdp(plan) and plan.cluster.gpu.device == "cpu" else set()
    return {key: value for key, value in training_arguments(plan).items() if key not in of_file}


def _of_trl(job: JobSpec) -> list[tuple[str, object, Any]]:
    """Arguments of TRL's configurations (trl/trainer/*_config.py)."""
    if job.objective not in TRL:
        return []
    if job.objective != "grpo":
        return [("max_length", True, job.seq_length)]
    grpo, share = job.grpo or GrpoSpec(), job.grpo and job.grpo.vllm_gpu_memory_utilization
    return [
        ("num_generations", True, grpo.num_generations),
        ("max_completion_length", True, grpo.max_completion_length),
        ("beta", True, grpo.beta),
        ("use_vllm", share, True),
        ("vllm_mode", share, "colocate"),
        ("vllm_gpu_memory_utilization", share, share),
        ("vllm_enable_sleep_mode", share and grpo.vllm_enable_sleep_mode, True),
    ]


FILES = (DerivedFile("ds_config.trainer.json", lambda plan: json_text(trainer_config(plan)), for_trainer),)

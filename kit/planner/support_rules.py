"""What a recipe can say and no engine here does: refused by name, never ignored."""

from __future__ import annotations

from kit.planner.rule import Rule
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Layout
from kit.specs.model import ModelSpec


def supported_job(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Precisions, objectives and optimizers that the engines have."""
    return _refused(
        {
            "precision": (job.precision, ("bf16", "fp32")),
            "objective": (job.objective, _OBJECTIVES[layout.engine]),
            "lora": (job.lora and "{…}", (None,) if layout.engine == "megatron" else (None, "{…}")),
            "optimizer.name": (job.optimizer.name, ("adamw",)),
        }
    )


_OBJECTIVES: dict[EngineName, tuple[object, ...]] = {
    "torch": ("pretrain", "sft", "seq2seq"),
    "deepspeed": ("pretrain", "sft", "seq2seq"),
    "megatron": ("pretrain",),
}


def supported_split(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Ways to divide the work that the engines have."""
    return _refused(
        {
            "recompute": (layout.recompute, ("none", "full")),
            "first_stage_layers": (layout.first_stage_layers, (None,)),
            "last_stage_layers": (layout.last_stage_layers, (None,)),
            "cp_comm_type": (layout.cp_comm_type, ("all_gather",)),
            "zero_hpz": (layout.zero_hpz, (1,)),
            "zero_quantized_weights": (layout.zero_quantized_weights, (False,)),
            "zero_quantized_gradients": (layout.zero_quantized_gradients, (False,)),
        }
    )


def _refused(values: dict[str, tuple[object, tuple[object, ...]]]) -> str | None:
    for key, (value, supported) in values.items():
        if value not in supported:
            choices = " or ".join(str(choice) for choice in supported if choice not in (None, False))
            return f"{key}={value} is not supported; " + (f"use {choices}" if choices else "leave it out")
    return None


SUPPORT_RULES: tuple[Rule, ...] = (Rule(supported_job), Rule(supported_split))
"""They shrink as the engines grow."""

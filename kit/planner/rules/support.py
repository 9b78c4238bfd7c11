"""What a recipe can say and no engine here does: refused by name, never ignored."""

from __future__ import annotations

from kit.planner.rules.rule import Rule
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import EngineName, Layout
from kit.specs.model import ModelSpec


def supported_job(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Precisions, objectives and optimizers that the engines have."""
    if job.optimizer.name == "adamw-8bit" and layout.engine != "torch":
        return (
            f"optimizer.name=adamw-8bit on engine={layout.engine}, whose optimizer is its own and keeps fp32 moments; "
            "use engine=torch, or optimizer.name=adamw"
        )
    return _refused(
        {
            "precision": (job.precision, ("bf16", "fp32", *_precisions(layout))),
            "objective": (job.objective, _objectives(layout)),
            "lora": (job.lora and "{…}", (None, "{…}") if _takes_adapters(layout) else (None,)),
            "optimizer.name": (job.optimizer.name, ("adamw", "adamw-8bit") if layout.engine == "torch" else ("adamw",)),
        }
    )


def _precisions(layout: Layout) -> tuple[object, ...]:
    """Beside bf16 and fp32. DeepSpeed scales fp16's losses with its own models; Megatron's settings have no fp16."""
    if layout.engine == "deepspeed" and layout.implementation != "huggingface":
        return ()
    return _PRECISIONS[layout.engine]


def _whole(layout: Layout) -> bool:
    """Every rank computes its own samples with a Hugging Face model."""
    return layout.implementation == "huggingface" and layout.tp == layout.cp == 1


def _takes_adapters(layout: Layout) -> bool:
    """Swapping to NVMe was not tried with frozen weights."""
    return _whole(layout) and "nvme" not in (layout.offload_optimizer, layout.offload_param)


def _objectives(layout: Layout) -> tuple[str, ...]:
    """Rows and pairs have lengths of their own, positions and a source, which not every split hands on."""
    if _whole(layout):
        return ("pretrain", "sft", "seq2seq")
    # Which document a position belongs to is read by our attention (kit/engines/megatron/model/attention.py) alone.
    rows = layout.engine == "megatron" and layout.implementation == "local"
    return ("pretrain", "sft") if rows else ("pretrain",)


_PRECISIONS: dict[EngineName, tuple[object, ...]] = {"torch": ("fp8",), "deepspeed": ("fp16",), "megatron": ("fp8",)}


def supported_split(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """Ways to divide the work that the engines have."""
    return _refused(
        {
            # Attention alone is computed again by megatron-core's layer (transformer/attention.py, core_attn).
            "recompute": (layout.recompute, ("none", "full", *(["selective"] if layout.engine == "megatron" else []))),
            "cp_comm_type": (layout.cp_comm_type, _EXCHANGES[layout.engine]),
        }
    )


_EXCHANGES: dict[EngineName, tuple[str, ...]] = {
    "torch": ("all_gather",),
    "deepspeed": ("all_gather", "a2a"),
    "megatron": ("all_gather", "p2p"),
}
"""With cp=1 the first is the default, and is not read."""


def _refused(values: dict[str, tuple[object, tuple[object, ...]]]) -> str | None:
    for key, (value, supported) in values.items():
        if value not in supported:
            choices = " or ".join(str(choice) for choice in supported if choice not in (None, False))
            return f"{key}={value} is not supported; " + (f"use {choices}" if choices else "leave it out")
    return None


SUPPORT_RULES: tuple[Rule, ...] = (Rule(supported_job), Rule(supported_split))
"""They shrink as the engines grow."""

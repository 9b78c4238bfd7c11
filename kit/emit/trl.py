"""TRL's trainers under kit's files: the arguments with which one of them, or a script of examples/, trains the plan.

Adapters and quantised weights are arguments of TRL's ``ModelConfig`` (trl/trainer/model_config.py, TRL 1.16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kit.emit.derived_file import chosen
from kit.emit.trainer import by_fsdp, script_arguments
from kit.planner.plan import Plan
from kit.specs.job import ATTENTION_LAYERS, TRL, JobSpec


def words(arguments: Mapping[str, Any]) -> list[str]:
    """``--key value …`` of each; true and false as transformers' parser reads them."""
    listed = {key: value if isinstance(value, list) else [value] for key, value in arguments.items()}
    return [word for key, values in listed.items() for word in (f"--{key}", *map(_word, values))]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def trl_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of a TRL script. TRL turns bf16 and recomputation on where nothing is said."""
    arguments = {"bf16": False, "gradient_checkpointing": False} | script_arguments(plan)
    length = chosen(("max_length", plan.job.objective not in TRL, plan.job.seq_length))
    return arguments | length | _adapters(plan)


def _adapters(plan: Plan) -> dict[str, Any]:
    job, lora = plan.job, plan.job.lora
    if lora is None:
        return {}
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(job.precision, "float32")
    return {
        "use_peft": True,
        "lora_r": lora.rank,
        "lora_alpha": round(lora.alpha),
        "lora_dropout": lora.dropout,
        "lora_target_modules": target_modules(job),
        "dtype": dtype,  # of the frozen weights
    } | chosen(
        ("lora_task_type", job.objective == "reward", "SEQ_CLS"),
        ("use_rslora", lora.use_rslora, True),
        ("use_dora", lora.use_dora, True),
        ("load_in_4bit", lora.four_bit, True),
        ("load_in_8bit", lora.eight_bit, True),
        # FSDP2 shards floating-point tensors alone, all of one dtype.
        ("bnb_4bit_quant_storage", lora.four_bit and by_fsdp(plan), dtype),
    )


def target_modules(job: JobSpec) -> list[str]:
    """Layers that get adapters, in peft's names. Attention's are Llama's: peft ends with an error where a model has
    others."""
    assert job.lora is not None
    if job.lora.target_modules:
        return list(job.lora.target_modules)
    return sorted(ATTENTION_LAYERS) if job.lora.targets == "attention" else ["all-linear"]


def not_in_trl(plan: Plan) -> Sequence[str]:
    """Adapters' settings that TRL has no argument for."""
    lora = plan.job.lora
    if lora is None:
        return ()
    fraction = {"alpha": lora.alpha} if lora.alpha != round(lora.alpha) else {}
    found = {"rank_pattern": dict(lora.rank_pattern), "alpha_pattern": dict(lora.alpha_pattern)} | fraction
    return [f"job.lora.{name}={value}" for name, value in found.items() if value]

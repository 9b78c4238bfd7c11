"""``ds_config.deepcompile.json`` and ``ds_config.superoffload.json``: the plan's configuration with one of DeepSpeed
0.19.8's newer switches, for scripts of your own. ``kit emit --target deepcompile|superoffload``.

kit's cost model does not price them, so no search chooses one, and kit's own loop refuses them
(``kit/engines/deepspeed/build.py``). There is no file for ZenFlow: it permutes the weights (docs/deepspeed.md).
"""

from __future__ import annotations

from typing import Any

from kit.addons.targets.programs import file_for
from kit.emit.deepspeed import ds_config
from kit.emit.derived_file import json_text
from kit.emit.trainer import for_trainer
from kit.planner.plan import Plan

SUPERCHIPS = ("GH200", "GB200", "GB300")
"""GPUs beside a host with NVLink-C2C, by the first word of their catalog name."""


_OWN_SCRIPTS = "it needs engine=deepspeed on a Hugging Face model with tp=1, cp=1"


def _deepcompile_refuses(plan: Plan) -> dict[str, object]:
    """engine.py, get_deepcompile_backend; compile/util.py, is_deepcompile_supported. It takes the hooks of ZeRO's own
    optimizer, and stage 1 with an fp32 sum of bf16 gradients has another (BF16_Optimizer)."""
    layout = plan.layout
    stage = layout.zero_stage
    return {
        _OWN_SCRIPTS: not for_trainer(plan),
        "it needs GPUs: its operators are CUDA's": plan.cluster.gpu.device != "cuda",
        "it needs zero_stage=2 or 3, or 1 with one micro batch a step": (
            stage == 0 or (stage == 1 and layout.gradient_accumulation_steps > 1)
        ),
        "it needs offload_param=none, no nvme and compile_layers=false": (
            layout.uses_nvme or layout.offload_param != "none" or layout.compile_layers
        ),
    }


def _superoffload_refuses(plan: Plan) -> dict[str, object]:
    """superoffload_stage3.py, _validate_superoffload_accelerator; offload_config.py: stage 3."""
    job, layout, gpu = plan.job, plan.layout, plan.cluster.gpu
    return {
        _OWN_SCRIPTS: not for_trainer(plan),
        "it needs zero_stage=3, offload_optimizer=cpu and offload_param=none": (
            (layout.zero_stage, layout.offload_optimizer, layout.offload_param) != (3, "cpu", "none")
        ),
        "it needs optimizer.name=adamw and precision=bf16": job.optimizer.name != "adamw" or job.precision != "bf16",
        f"it needs a superchip ({', '.join(SUPERCHIPS)}), and {gpu.name} is none": not gpu.name.startswith(SUPERCHIPS),
    }


def deepcompile(plan: Plan) -> dict[str, Any]:
    """The script calls ``engine.compile()`` after ``deepspeed.initialize``; accelerate does so for a dynamo backend."""
    return ds_config(plan) | {"compile": {"deepcompile": True}}


def superoffload(plan: Plan) -> dict[str, Any]:
    """The whole optimizer stays on the host, as the plan counts it (``ratio`` is 1). With gradient clipping DeepSpeed
    steps after backward; without, while backward runs (superoffload_stage3.py)."""
    config = ds_config(plan)
    config["zero_optimization"]["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
    return config


FILES = (
    file_for(
        "deepcompile", "ds_config.deepcompile.json", lambda plan: json_text(deepcompile(plan)), _deepcompile_refuses
    ),
    file_for(
        "superoffload", "ds_config.superoffload.json", lambda plan: json_text(superoffload(plan)), _superoffload_refuses
    ),
)

"""``ds_config.own_optimizer.json`` and ``accelerate.own_optimizer.yaml``: for scripts that make their own optimizer.

Such a script (for example Hugging Face's ``run_*_no_trainer.py``) passes ``torch.optim.AdamW`` and its scheduler to
``Accelerator.prepare``. accelerate refuses an optimizer both in the code and in the file, so the file has none. It has
``"auto"`` where accelerate fills in values: batch sizes from the data loaders, gradient accumulation from the
``Accelerator`` (accelerator.py, _prepare_deepspeed).
"""

from __future__ import annotations

from typing import Any

from kit.emit.accelerate import accelerate_config
from kit.emit.deepspeed import ds_config
from kit.emit.derived_file import DerivedFile, json_text
from kit.emit.trainer import AUTO, for_trainer
from kit.planner.plan import Plan
from kit.specs import strict_yaml

DS_CONFIG, ACCELERATE = "ds_config.own_optimizer.json", "accelerate.own_optimizer.yaml"
_FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def own_optimizer_config(plan: Plan) -> dict[str, Any]:
    """``ds_config(plan)`` without an optimizer. accelerate replaces an offloaded AdamW by DeepSpeedCPUAdam."""
    on_cpu = plan.layout.offload_optimizer != "none" and plan.cluster.gpu.device == "cpu"
    own = {
        **dict.fromkeys(_FILLED, AUTO),
        # DeepSpeed refuses other optimizers without this key (engine.py, _do_optimizer_sanity_check).
        "zero_allow_untested_optimizer": True,
        # torch's AdamW runs on a CPU too; DeepSpeedCPUAdam would take a minute to compile.
        **({"zero_force_ds_cpu_optimizer": False} if on_cpu else {}),
    }
    return {key: value for key, value in (ds_config(plan) | own).items() if key != "optimizer"}


def _yaml(plan: Plan) -> str:
    config = accelerate_config(plan)
    named = config["deepspeed_config"] | {"deepspeed_config_file": DS_CONFIG}
    return strict_yaml.dump(config | {"deepspeed_config": named})


FILES = (
    DerivedFile(DS_CONFIG, lambda plan: json_text(own_optimizer_config(plan)), for_trainer),
    DerivedFile(ACCELERATE, _yaml, for_trainer),
)

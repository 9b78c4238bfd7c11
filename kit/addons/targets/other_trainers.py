"""The plan for other training programs: a file each, with its batch, sharding, precision and recomputation.

``kit emit --target accelerate-parallelism|axolotl|llamafactory|ms-swift|torchtitan``. Model, data and length are the
user's: ``REPLACE-ME``, or arguments. ``programs.py`` has the versions; their own parsers read the files in
``tests/system/other_trainers.py``, torchtitan's apart, whose version is no release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.addons.configs.writing import written
from kit.addons.targets.programs import torchrun, version_line
from kit.emit.accelerate import accelerate_config
from kit.emit.derived_file import DerivedFile, chosen
from kit.emit.trainer import for_trainer
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.job import LoraSpec
from kit.specs.layout import DEFAULTS

_OWN = "REPLACE-ME"
_DEEPSPEED = "ds_config.trainer.json"
_BITS = {"four_bit": 4, "eight_bit": 8}
_NOTE = "# kit decided batch, sharding, precision and recomputation. Model, data and length of the run are yours.\n"
_OF_EPOCHS = "# kit decided batch, sharding, precision and recomputation; model and data are yours.\n"
_OBJECTIVES = {"pretrain": "pt", "sft": "sft"}
_UNSAID = (
    "cp",
    "activation_offloading",
    "tiled_mlp",
    "optimizer_state_dtype",
    "gradient_dtype",
    "gradient_compression",
)
"""Fields of a layout that the files of all three programs leave out; with another value a plan has no such file."""
_FSDP = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
    "cpu_ram_efficient_loading": True,
}
_TITAN = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
}
"""Catalog model → (module, config) of torchtitan's registry."""


def _on_torch(plan: Plan) -> bool:
    layout = plan.layout
    whole = layout.implementation == "huggingface" and layout.zero_stage in (0, 3) and layout.ep == 1
    return layout.engine == "torch" and whole and plan.cluster.gpu.device == "cuda"


def _fine_tunes(plan: Plan) -> bool:
    """Whether programs for Hugging Face models train the plan: all ranks data-parallel, by DeepSpeed, DDP or FSDP2."""
    job, layout, lora = plan.job, plan.layout, plan.job.lora or LoraSpec(targets="all-linear")
    of_torch = _on_torch(plan) and layout.tp == 1 and layout.recompute != "selective"
    needs = (
        job.objective in _OBJECTIVES,
        job.precision != "fp8",
        job.optimizer.name == "adamw",
        lora.targets == "all-linear" or lora.target_modules,
        not lora.rank_pattern,
        not lora.alpha_pattern,
        all(getattr(layout, name) == DEFAULTS[name] for name in _UNSAID),
        plan.cluster.gpu.device == "cuda",
        of_torch or for_trainer(plan),
    )
    return all(needs)


def _loads_in_fp32(plan: Plan) -> bool:
    """Axolotl and ms-swift train the 16 bits that they load, unless FSDP or DeepSpeed makes fp32 of them."""
    sharded = plan.layout.engine == "deepspeed" or plan.layout.zero_stage > 0
    return _fine_tunes(plan) and (sharded or plan.job.lora is not None or plan.job.precision == "fp32")


def _dumped(target: str, how: str, data: dict[str, Any], epochs: float | None = None) -> str:
    return f"{_NOTE if epochs is None else _OF_EPOCHS}{version_line(target)}\n# {how}\n{strict_yaml.dump(data)}"


def _launched(plan: Plan, program: str) -> str:
    """The command: accelerate starts what its file shards; torchrun starts DeepSpeed and DDP."""
    layout, nodes = plan.layout, plan.cluster.num_nodes
    if layout.engine == "torch" and layout.world_size > 1:
        return f"accelerate launch --config_file accelerate.yaml {program}"
    return f"torchrun --nnodes {nodes} --nproc-per-node {plan.cluster.gpus_per_node} {program}"


_OF_ADAPTERS: dict[str, Callable[[LoraSpec], dict[str, Any]]] = {
    "axolotl": lambda lora: (
        {"load_in_4bit": lora.four_bit}
        | chosen(
            ("adapter", lora.four_bit, "qlora"),
            ("lora_target_modules", lora.target_modules, list(lora.target_modules)),
            ("lora_target_linear", lora.target_modules, None),
        )
    ),
    "llamafactory": lambda lora: (
        {"lora_target": ",".join(lora.target_modules) or "all"}
        | chosen(
            ("quantization_bit", lora.quantised, _BITS.get(lora.quantised)),
            ("quantization_method", lora.quantised, "bnb"),
        )
    ),
    "ms-swift": lambda lora: (
        {"target_modules": list(lora.target_modules) or ["all-linear"]}
        | chosen(("quant_method", lora.quantised, "bnb"), ("quant_bits", lora.quantised, _BITS.get(lora.quantised)))
    ),
}
"""Target → its keys for adapters that no field of kit decides alone."""


def _file(
    target: str,
    how: Callable[[Plan], str],
    applies: Callable[[Plan], bool],
    others: Callable[[Plan], dict[str, Any]] = lambda plan: {},
) -> DerivedFile:
    """A program's file, by its table of keys. ``how``: the command that reads it. ``others``: keys beside those of
    adapters that no field of kit decides alone."""

    def text(plan: Plan) -> str:
        own = others(plan) | chosen(("deepspeed", plan.layout.engine == "deepspeed", _DEEPSPEED))
        if plan.job.lora:
            own |= {"lora_alpha": round(plan.job.lora.alpha)} | _OF_ADAPTERS[target](plan.job.lora)
        return _dumped(target, how(plan), written(target, plan, own), plan.job.epochs)

    return DerivedFile(f"{target.replace('-', '_')}.yaml", text, applies, target=target)


def parallelism(plan: Plan) -> dict[str, Any]:
    """accelerate's own file with its ``parallelism_config``, which needs FSDP2."""
    layout = plan.layout
    sizes = {"dp_replicate_size": 1, "dp_shard_size": layout.dp, "tp_size": layout.tp, "cp_size": layout.cp}
    return accelerate_config(plan) | {
        "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}
    }


def _of_axolotl(plan: Plan) -> dict[str, Any]:
    """Data sets, FSDP and kernels."""
    layout, kind = plan.layout, "completion" if plan.job.objective == "pretrain" else "chat_template"
    sharded = layout.engine == "torch" and layout.zero_stage == 3
    return {"datasets": [{"path": _OWN, "type": kind}]} | chosen(
        ("fsdp_version", sharded, 2),
        ("fsdp_config", sharded, _FSDP | chosen(("offload_params", layout.offload_param != "none", True))),
        ("dp_shard_size", sharded, layout.dp),
        ("plugins", layout.chunked_loss, ["axolotl.integrations.liger.LigerPlugin"]),
    )


def for_torchtitan(plan: Plan) -> bool:
    """Whether torchtitan has the model, and shards it as the plan does: DDP or FSDP2, with tensor parallelism."""
    needs = (
        plan.model.name in _TITAN,
        plan.job.lora is None,
        plan.job.objective == "pretrain",
        plan.job.precision in ("bf16", "fp32"),
        not plan.layout.autocast,
        _on_torch(plan),
    )
    return all(needs)


def torchtitan_arguments(plan: Plan) -> list[str]:
    """Arguments of ``torchtitan.train``; the last is the kind of recomputation."""
    job, layout = plan.job, plan.layout
    module, config = _TITAN[plan.model.name]
    sharded = layout.zero_stage == 3
    values = {
        "training.num-tokens-per-microbatch-per-dp-rank": layout.micro_batch_size * job.seq_length,
        "training.num-tokens-per-train-step": job.global_batch_size * job.seq_length,
        "training.max-context-length": job.seq_length,
        "training.max-norm": job.grad_clip,
        "training.mixed-precision-param": "bfloat16" if job.precision == "bf16" else "float32",
        "parallelism.data-parallel-replicate-degree": 1 if sharded else layout.dp,
        "parallelism.data-parallel-shard-degree": layout.dp if sharded else 1,
        "parallelism.tensor-parallel-degree": layout.tp,
        "parallelism.context-parallel-degree": layout.cp,
        "parallelism.pipeline-parallel-degree": 1,
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return ["--module", module, "--config", config, *flags, f"activation-checkpoint:{layout.recompute}"]


def _torchtitan_script(plan: Plan) -> str:
    words = " ".join(torchtitan_arguments(plan)).replace(" --", " \\\n  --")
    return (
        "#!/usr/bin/env bash\n"
        f"{_NOTE}{version_line('torchtitan')}\n"
        "# torchtitan's registry gives the data set, the learning rate and the optimizer.\n"
        "# bash torchtitan.sh --training.steps 1000 …; on several nodes RDZV is HOST:PORT of the first.\n"
        "set -euo pipefail\n"
        f'exec {torchrun(plan, "torchtitan.train")} "$@" \\\n'
        f"  {words}\n"
    )


FILES = (
    DerivedFile(
        "accelerate.parallelism.yaml",
        lambda plan: _dumped(
            "accelerate-parallelism",
            "accelerate launch --config_file accelerate.parallelism.yaml SCRIPT",
            parallelism(plan),
        ),
        lambda plan: _on_torch(plan) and plan.layout.zero_stage == 3 and plan.layout.world_size > 1,
        target="accelerate-parallelism",
    ),
    _file("axolotl", lambda plan: "axolotl train axolotl.yaml", _loads_in_fp32, _of_axolotl),
    # transformers' arguments, each program with its own beside them: llamafactory-cli train, swift sft
    _file("llamafactory", lambda plan: _launched(plan, "-m llamafactory.launcher llamafactory.yaml"), _fine_tunes),
    _file(
        "ms-swift",
        lambda plan: _launched(plan, f"-m swift.cli.{_OBJECTIVES[plan.job.objective]} ms_swift.yaml"),
        _loads_in_fp32,
    ),
    DerivedFile("torchtitan.sh", _torchtitan_script, for_torchtitan, target="torchtitan"),
)

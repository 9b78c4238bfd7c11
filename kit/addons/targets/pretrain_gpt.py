"""Plan → ``pretrain_gpt.sh``: the plan as flags of Megatron-LM's own trainer.

The flags are derived from megatron.yaml's settings, key by key, so the two cannot differ. Read in Megatron-LM at tag
core_v0.16.1, ``megatron/training/arguments.py``, and of Muon at core_v0.19.2; a test checks every flag against the
recorded table of its parser.
Data, schedule and checkpoints are in run.yaml, so the user gives them as arguments of the script.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kit.emit.derived_file import DerivedFile
from kit.emit.environment import assignments
from kit.emit.launch import nodes, torchrun
from kit.emit.megatron import megatron_settings
from kit.object_storage import is_address
from kit.planner.plan import Plan
from kit.specs.run import RunSpec
from kit.specs.text import first, shown

TAG, MUONS_TAG = "core_v0.16.1", "core_v0.19.2"

_ROPE = ("default", "llama3")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fixed in models/common/embeddings/rotary_pos_embedding.py, ``_apply_scaling``."""

Args = list[str]


def why_not(plan: Plan) -> str | None:
    """Why Megatron-LM's pretrain_gpt.py cannot run the plan; None if it has flags for all settings."""
    model, job, scaling = plan.model, plan.job, plan.model.rope_scaling or {}
    keys = {f"{section}.{key}" for section, values in megatron_settings(plan).items() for key in values}
    unknown = sorted(keys - _FLAGS.keys())
    said = (
        f"job.objective is {job.objective}, and pretrain_gpt.py trains on whole documents, without a mask of the prompt"
    )
    kind, factor = scaling.get("rope_type", "default"), scaling.get("factor", 1.0)
    reasons = {
        said: job.objective != "pretrain",
        f"it has no flag for {', '.join(unknown[:1])} of megatron.yaml": unknown,
        "--muon-fp32-matmul-prec takes low, medium or high, and fp32 is highest": (
            job.optimizer.name == "muon" and job.precision == "fp32"
        ),
        f"its model builder has no layers for {model.family}": not model.traits.transformer_engine,
        "it has no flag for the RoPE scaling of this model": kind not in _ROPE
        or (kind == "llama3" and any(scaling.get(key) != value for key, value in _LLAMA3.items())),
        f"--rope-scaling-factor is a number, and the model has {shown(factor)}": not isinstance(factor, int | float),
        f"--rotary-base is an integer, and the model has {model.rope_theta}": (
            not float(model.rope_theta or 0).is_integer()
        ),
    }
    return first(reasons)


def pretrain_gpt_arguments(plan: Plan) -> list[Args]:
    """Flags and their values, one list each, unquoted. Pure and deterministic."""
    settings = megatron_settings(plan)
    found = [
        _words(f"{section}.{key}", value, settings["transformer_config"])
        for section, keys in settings.items()
        for key, value in keys.items()
    ]
    found += _job_arguments(plan)
    return [args for args in found if args]


def pretrain_gpt_script(plan: Plan) -> str:
    """A bash script that starts this node's processes of Megatron-LM's pretrain_gpt.py."""
    muon = plan.job.optimizer.name == "muon"
    lines = [
        "#!/usr/bin/env bash",
        f"# The plan of this directory for Megatron-LM's own trainer (tag {MUONS_TAG if muon else TAG}), in its flags. "
        "Arguments go to it,",
        "# and win over those below. It needs data, a number of steps and where to save, for example:",
        "#   MEGATRON_LM=/path/to/Megatron-LM ./pretrain_gpt.sh --data-path data/train --split 99,1,0 \\",
        "#       --train-iters 1000 --lr-warmup-iters 100 --save checkpoints --save-interval 500 \\",
        "#       --load converted --dist-ckpt-strictness log_all",
        "# Weights to start from: kit convert model DIRECTORY --to megatron --out converted",
        *["# Its Muon orthogonalises gate and up as one matrix; kit's worker, one by one."]
        * (muon and plan.model.gated_mlp),
        "set -euo pipefail",
        ': "${MEGATRON_LM:?directory of a Megatron-LM checkout}"',
        'PYTHON="${PYTHON:-python}"',
        *assignments(plan),
        *nodes(plan),
        "arguments=(",
        *(f"    {shlex.join(args)}" for args in pretrain_gpt_arguments(plan)),
        ")",
        " ".join(["exec", '"$PYTHON"', *torchrun(plan), '"$MEGATRON_LM/pretrain_gpt.py"', '"${arguments[@]}"', '"$@"']),
    ]
    return "\n".join(lines) + "\n"


def of_run(text: str, run: RunSpec) -> str:
    """The script for a run's data."""
    if run.data.stream is not None:
        return refusing_stream(text)
    return with_blend(text, [(part.weight, part.path) for part in run.data.blend.values()])


def with_blend(text: str, blend: Sequence[tuple[float, str]]) -> str:
    """The script with a run's blend as ``--data-path``. ``blend``: (weight, prefix) of each set; a prefix is below
    ``~``, relative to the script's directory, or an address. Megatron-LM reads those of s3:// itself."""
    if not blend:
        return text
    addresses = [prefix for _, prefix in blend if is_address(prefix)]
    if unread := [prefix for prefix in addresses if not prefix.startswith("s3://")]:
        said = f"# It reads sets on a disk and at s3://, and run.data.blend has {unread[0]}: copy the sets to a disk."
        return text.replace("set -euo pipefail\n", f"{said}\nset -euo pipefail\n", 1)
    words = " ".join(f"{weight} {_from_anywhere(prefix)}" for weight, prefix in blend)
    if addresses:  # megatron/core/datasets/gpt_dataset.py, build_low_level_dataset
        words += '\n    --no-mmap-bin-files --object-storage-cache-path "$HERE"/indexes'
    here = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
    return text.replace("\narguments=(\n", f"\n{here}\narguments=(\n    --data-path {words}\n", 1)


def refusing_stream(text: str) -> str:
    """The script of a run that streams its data, which Megatron-LM cannot: without a ``--data-path`` it ends."""
    said = (
        "error: run.data.stream: Megatron-LM reads .bin/.idx pairs only; write one (kit convert data), give --data-path"
    )
    check = f'[[ " $* " == *" --data-path"* ]] || {{ echo {shlex.quote(said)} >&2; exit 2; }}'
    return text.replace("set -euo pipefail\n", f"set -euo pipefail\n{check}\n", 1)


def _from_anywhere(prefix: str) -> str:
    """A shell word."""
    if is_address(prefix):
        return shlex.quote(prefix)
    below_home = prefix.startswith("~/")
    return f'"${"HOME" if below_home else "HERE"}"/{shlex.quote(prefix[2:] if below_home else prefix)}'


def _job_arguments(plan: Plan) -> list[Args]:
    """Flags for settings that are not in megatron.yaml, because kit's training loop reads them from the plan."""
    model, job, layout, scaling = plan.model, plan.job, plan.layout, plan.model.rope_scaling or {}
    factor = [["--use-rope-scaling"], ["--rope-scaling-factor", str(scaling.get("factor"))]]
    return [
        ["--seq-length", str(job.seq_length)],
        ["--micro-batch-size", str(layout.micro_batch_size)],
        ["--global-batch-size", str(job.global_batch_size)],
        ["--lr-decay-style", "cosine"],
        # The data are tokenised already; this tokenizer adds one token to its vocabulary size, for the end of a text.
        ["--tokenizer-type", "NullTokenizer"],
        ["--vocab-size", str(model.vocab_size - 1)],
        ["--make-vocab-size-divisible-by", "1"],
        # Megatron-LM's local layers have no sequence or context parallelism; with Transformer Engine the sizes mean
        # the same.
        ["--transformer-impl", "transformer_engine"],
        ["--ckpt-format", "torch_dist"],
        *([["--group-query-attention"]] if model.num_key_value_heads != model.num_attention_heads else []),
        *([] if model.rope_theta is None else [["--rotary-base", str(int(model.rope_theta))]]),
        *(factor if scaling.get("rope_type", "default") == "llama3" else []),
    ]


def _same(expected: tuple[Any, ...], value: Any, _: Mapping[str, Any]) -> Args:
    """No flag: these values are Megatron-LM's behaviour without a flag."""
    assert value in expected, (value, expected)
    return []


def _per_token_loss(value: Any, config: Mapping[str, Any]) -> Args:
    """No flag if routers have a loss, because the flag would divide that loss by the ranks that share a sequence
    (moe/router.py). In pretraining all tokens count, so the mean over micro batches is the same."""
    has_loss = "moe_aux_loss_coeff" in config or "moe_z_loss_coeff" in config
    return ["--calculate-per-token-loss"] if value and not has_loss else []


_OF_ANOTHER = ""
"""No flag: that of another key sets this value too."""
_DTYPES = ("float32", "bfloat16", "float16")
_FLAGS: dict[str, str | Callable[[Any, Mapping[str, Any]], Args]] = {
    "parallel_state.tensor_model_parallel_size": _OF_ANOTHER,
    "parallel_state.pipeline_model_parallel_size": _OF_ANOTHER,
    "parallel_state.context_parallel_size": _OF_ANOTHER,
    "parallel_state.virtual_pipeline_model_parallel_size": _OF_ANOTHER,
    "parallel_state.expert_model_parallel_size": _OF_ANOTHER,
    "parallel_state.expert_tensor_parallel_size": _OF_ANOTHER,
    "transformer_config.num_layers": "--num-layers",
    "transformer_config.mtp_num_layers": "--mtp-num-layers",
    "transformer_config.mtp_loss_scaling_factor": "--mtp-loss-scaling-factor",
    "transformer_config.hidden_size": "--hidden-size",
    "transformer_config.ffn_hidden_size": "--ffn-hidden-size",
    "transformer_config.num_attention_heads": "--num-attention-heads",
    "transformer_config.num_query_groups": lambda value, config: (  # with --group-query-attention below
        [] if value == config["num_attention_heads"] else ["--num-query-groups", str(value)]
    ),
    "transformer_config.kv_channels": "--kv-channels",
    "transformer_config.normalization": "--normalization",
    "transformer_config.layernorm_epsilon": "--norm-epsilon",
    # Without a flag: gelu fused with the bias, by the tangent (fusions/fused_bias_gelu.py).
    "transformer_config.activation_func": lambda value, config: {
        ("silu", True): ["--swiglu"],
        ("gelu_tanh", False): [],
    }[value, config["gated_linear_unit"]],
    "transformer_config.gated_linear_unit": _OF_ANOTHER,
    "transformer_config.add_bias_linear": lambda value, _: [] if value else ["--disable-bias-linear"],
    "transformer_config.add_qkv_bias": "--add-qkv-bias",
    "transformer_config.qk_layernorm": "--qk-layernorm",
    "transformer_config.hidden_dropout": "--hidden-dropout",
    "transformer_config.attention_dropout": "--attention-dropout",
    "transformer_config.gradient_accumulation_fusion": lambda value, _: (
        [] if value else ["--no-gradient-accumulation-fusion"]
    ),
    "transformer_config.calculate_per_token_loss": _per_token_loss,
    "transformer_config.bf16": "--bf16",
    "transformer_config.params_dtype": partial(_same, _DTYPES),
    "transformer_config.pipeline_dtype": partial(_same, _DTYPES),
    "transformer_config.tensor_model_parallel_size": "--tensor-model-parallel-size",
    "transformer_config.pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "transformer_config.context_parallel_size": "--context-parallel-size",
    "transformer_config.virtual_pipeline_model_parallel_size": lambda value, config: (
        []
        if "pipeline_model_parallel_layout" in config  # which says it
        else ["--num-virtual-stages-per-pipeline-rank", str(value)]
    ),
    "transformer_config.pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "transformer_config.cp_comm_type": "--cp-comm-type",
    "transformer_config.sequence_parallel": "--sequence-parallel",
    "transformer_config.num_moe_experts": "--num-experts",
    "transformer_config.moe_router_topk": "--moe-router-topk",
    "transformer_config.moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "transformer_config.moe_router_pre_softmax": "--moe-router-pre-softmax",
    "transformer_config.moe_router_load_balancing_type": "--moe-router-load-balancing-type",
    "transformer_config.moe_aux_loss_coeff": "--moe-aux-loss-coeff",
    "transformer_config.moe_z_loss_coeff": "--moe-z-loss-coeff",
    "transformer_config.moe_expert_capacity_factor": "--moe-expert-capacity-factor",
    "transformer_config.moe_router_dtype": "--moe-router-dtype",
    "transformer_config.moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "transformer_config.moe_flex_dispatcher_backend": "--moe-flex-dispatcher-backend",
    "transformer_config.moe_shared_expert_overlap": "--moe-shared-expert-overlap",
    "transformer_config.overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "transformer_config.moe_grouped_gemm": "--moe-grouped-gemm",
    "transformer_config.moe_permute_fusion": "--moe-permute-fusion",
    "transformer_config.expert_model_parallel_size": "--expert-model-parallel-size",
    "transformer_config.expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "transformer_config.window_size": lambda value, _: ["--window-size", ",".join(map(str, value))],
    # arguments.py sets all three for interleaved stages, and frees outputs by default.
    "transformer_config.deallocate_pipeline_outputs": partial(_same, (True,)),
    "transformer_config.overlap_p2p_comm": partial(_same, (True,)),
    "transformer_config.batch_p2p_comm": partial(_same, (False,)),
    "transformer_config.recompute_granularity": "--recompute-granularity",
    "transformer_config.recompute_method": "--recompute-method",
    "transformer_config.recompute_num_layers": "--recompute-num-layers",
    "transformer_config.recompute_modules": lambda value, _: ["--recompute-modules", *value],
    "transformer_config.fp8": "--fp8-format",
    "transformer_config.fp8_recipe": "--fp8-recipe",
    "model.vocab_size": _OF_ANOTHER,
    "model.max_sequence_length": "--max-position-embeddings",
    "model.share_embeddings_and_output_weights": lambda value, _: (
        [] if value else ["--untie-embeddings-and-output-weights"]
    ),
    "model.position_embedding_type": "--position-embedding-type",
    "transformer_config.fp8_param": _OF_ANOTHER,
    "distributed_data_parallel.fp8_param_gather": "--fp8-param-gather",
    "distributed_data_parallel.reuse_grad_buf_for_mxfp8_param_ag": "--reuse-grad-buf-for-mxfp8-param-ag",
    # arguments.py, validate_args, turns the first flag on by itself in bf16, unless it reads the second.
    "distributed_data_parallel.grad_reduce_in_fp32": lambda value, _: [
        "--accumulate-allreduce-grads-in-fp32" if value else "--grad-reduce-in-bf16"
    ],
    "distributed_data_parallel.overlap_grad_reduce": "--overlap-grad-reduce",
    "distributed_data_parallel.use_distributed_optimizer": "--use-distributed-optimizer",
    "optimizer.optimizer": "--optimizer",
    "optimizer.lr": "--lr",
    "optimizer.adam_beta1": "--adam-beta1",
    "optimizer.adam_beta2": "--adam-beta2",
    "optimizer.sgd_momentum": "--sgd-momentum",
    "optimizer.adam_eps": "--adam-eps",
    "optimizer.muon_momentum": "--muon-momentum",
    "optimizer.muon_nesterov": "--muon-nesterov",
    "optimizer.muon_coefficient_type": "--muon-coefficient-type",
    "optimizer.muon_scale_mode": "--muon-scale-mode",
    "optimizer.muon_extra_scale_factor": "--muon-extra-scale-factor",
    "optimizer.muon_fp32_matmul_prec": "--muon-fp32-matmul-prec",
    "optimizer.muon_tp_mode": "--muon-tp-mode",
    "optimizer.weight_decay": "--weight-decay",
    "optimizer.clip_grad": "--clip-grad",
    "optimizer.optimizer_cpu_offload": "--optimizer-cpu-offload",
    "optimizer.optimizer_offload_fraction": "--optimizer-offload-fraction",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "--overlap-cpu-optimizer-d2h-h2d",
    "optimizer.use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "optimizer.exp_avg_dtype": "--exp-avg-dtype",
    "optimizer.exp_avg_sq_dtype": "--exp-avg-sq-dtype",
    "optimizer.main_grads_dtype": "--main-grads-dtype",
    "optimizer.fp8_recipe": _OF_ANOTHER,
    "optimizer.reuse_grad_buf_for_mxfp8_param_ag": _OF_ANOTHER,
    "optimizer.bf16": _OF_ANOTHER,
    "optimizer.params_dtype": partial(_same, _DTYPES),
    "optimizer.use_distributed_optimizer": _OF_ANOTHER,
}
"""Key of megatron.yaml → its flag, with the value or, for a switch that is on, without; or the words for a value beside
its ``transformer_config``."""


def _words(key: str, value: Any, config: Mapping[str, Any]) -> Args:
    flag = _FLAGS[key]
    if not isinstance(flag, str):
        return flag(value, config)
    return [] if flag == _OF_ANOTHER or value is False else [flag] if value is True else [flag, str(value)]


def _told(plan: Plan) -> list[str]:
    if plan.layout.engine != "megatron":
        return []
    reason = why_not(plan)
    start = f"There is no `pretrain_gpt.sh`: {reason}." if reason else "`pretrain_gpt.sh` starts it."
    return ["## Megatron-LM's pretrain_gpt.py", start]


def _applies(plan: Plan) -> bool:
    return plan.layout.engine == "megatron" and why_not(plan) is None


FILES = (DerivedFile("pretrain_gpt.sh", pretrain_gpt_script, _applies, of_run=of_run, told=_told),)

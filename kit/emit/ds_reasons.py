"""``ds_config.md``: why every key of a run's ``ds_config.json`` has its value, from one table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kit.emit.deepspeed import ds_config
from kit.emit.trainer import training_arguments
from kit.planner.plan import Plan

_ROOT = "zero_optimization"
_OFFLOAD = {
    "device": "where it is kept between uses; the plan's choice (see plan.yaml, decisions)",
    "pin_memory": "page-locked memory is what a GPU's copy engines need; CPU processes would only lock it away",
}

REASONS: Mapping[str, str] = {
    "train_batch_size": "sequences of an optimizer step over all ranks; DeepSpeed asserts that it is the product of "
    "the next two and the ranks",
    "train_micro_batch_size_per_gpu": "sequences at once on a rank; the largest that is fast and fits, or pinned",
    "gradient_accumulation_steps": "what is left of the batch",
    "optimizer.type": "AdamW; DeepSpeed takes its fused one on GPUs, and its CPU one under offload",
    "optimizer.params.lr": "a placeholder: the training loop sets it before every step, and there is no scheduler",
    "optimizer.params.betas": "job.optimizer",
    "optimizer.params.eps": "job.optimizer; added to the root of the second moment",
    "optimizer.params.weight_decay": "job.optimizer; for matrices: norms and biases are in a group without",
    "optimizer.params.torch_adam": "torch's AdamW: on CPUs DeepSpeed's own would be compiled at first use for the same "
    "result; in bf16 without ZeRO its FusedAdam would flatten all master weights into one tensor",
    "gradient_clipping": "job.grad_clip: the global norm that gradients are scaled down to",
    "bf16.enabled": "bf16 weights and gradients, fp32 masters and moments",
    "data_types.grad_accum_dtype": "sums over micro batches in fp32; DeepSpeed's default, bf16, loses a micro batch's "
    "share once the sum is 256 times larger",
    "wall_clock_breakdown": "the training loop measures; these timers synchronise the device around every phase",
    "steps_per_print": "the training loop logs; null turns DeepSpeed's own line off",
    f"{_ROOT}.stage": "what is spread over ranks: 1 optimizer state, 2 gradients too, 3 weights too",
    f"{_ROOT}.overlap_comm": "reduce a bucket while backward computes the next; CPU processes have no streams for it",
    f"{_ROOT}.contiguous_gradients": "gradients of a bucket lie side by side, and are sent without a copy",
    f"{_ROOT}.reduce_bucket_size": "elements; the largest matrix of a layer, so that it goes through the bucket, and "
    "at least a million per rank, so that a rank's share is bandwidth and not latency. The default, 5e8, is 1 GB",
    f"{_ROOT}.allgather_bucket_size": "elements gathered at once after a step; the size that serves reductions, even",
    f"{_ROOT}.stage3_prefetch_bucket_size": "elements on their way while a matrix is multiplied: the largest matrix",
    f"{_ROOT}.stage3_param_persistence_threshold": "ten hidden sizes: norms and biases stay whole, whose gathering "
    "is latency alone; every matrix is larger",
    f"{_ROOT}.stage3_gather_16bit_weights_on_model_save": "without it save_16bit_model writes empty tensors",
    f"{_ROOT}.sub_group_size": "elements that a rank reads, steps and writes at a time, and that its pinned buffers "
    "hold: bandwidth, not latency, at 1.6 GB; the default, 1e9, pins 16 GB. Smaller on many ranks with weights on "
    "NVMe, where each rank pins a buffer for whole weights",
    f"{_ROOT}.stage3_max_reuse_distance": "release a weight after its use, and its swap buffer with it; with the "
    "default, 1e9, buffers run out in the first forward pass",
    **{f"{_ROOT}.offload_optimizer.{key}": reason for key, reason in _OFFLOAD.items()},
    **{f"{_ROOT}.offload_param.{key}": reason for key, reason in _OFFLOAD.items()},
    f"{_ROOT}.offload_optimizer.buffer_count": "a master, its gradient and two moments are in memory at once",
    f"{_ROOT}.offload_param.buffer_count": "one matrix in use, and the four that follow read meanwhile",
    f"{_ROOT}.offload_param.buffer_size": "elements of a rank's part of the largest weight: the least that works",
    f"{_ROOT}.offload_param.max_in_cpu": "all weights go to NVMe; the default, 1e9 on each rank, keeps them in memory",
    "aio.block_size": "1 MiB a request; DeepSpeed swaps nothing smaller",
    "aio.queue_depth": "requests in flight: enough to keep a drive busy; ds_nvme_tune measures better values",
    "aio.intra_op_parallelism": "threads of a rank, which keep a striped array busy; CPU rehearsals share few cores",
    "aio.single_submit": "requests are handed over in batches",
    "aio.overlap_events": "finished requests are collected while others are submitted",
}
"""Dotted key → reason. A test holds it to the keys that are emitted, in both directions."""


def ds_config_page(plan: Plan) -> str:
    """Markdown: a row a key, and what the Hugging Face Trainer has to be told beside ``ds_config.trainer.json``."""
    lines = [
        "# ds_config.json, key by key",
        "",
        f"{plan.model.name} on {plan.cluster.num_gpus} x {plan.cluster.gpu.name}. Keys that are not here keep "
        "DeepSpeed's default. A change of batch, stage, precision or offload belongs into the recipe; any other is "
        "honoured.",
        "",
        "| key | value | reason |",
        "|---|---|---|",
        *(f"| `{key}` | `{json.dumps(value)}` | {REASONS[key]} |" for key, value in flat(ds_config(plan)).items()),
        "",
    ]
    if "nvme" in (plan.layout.offload_optimizer, plan.layout.offload_param):
        lines += [
            "`nvme_path` is not here: it is the run's (`run.nvme_path`), and the worker adds it. A script of your "
            "own adds it to both offload sections.",
            "",
        ]
    arguments = " ".join(f"--{key} {_word(value)}" for key, value in training_arguments(plan).items())
    lines += [
        "## With the Hugging Face Trainer",
        "",
        "`ds_config.trainer.json` leaves to the Trainer what it fills in from its own arguments, and refuses to differ",
        "from. With these it fills in the numbers above:",
        "",
        f"    --deepspeed ds_config.trainer.json {arguments}",
        "",
    ]
    return "\n".join(lines)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections → dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return keys


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

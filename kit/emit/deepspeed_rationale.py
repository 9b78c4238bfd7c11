"""``ds_config.md``: why every key of a run's ``ds_config.json`` has its value, from one table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kit.emit.deepspeed import ds_config, runs_deepspeed
from kit.emit.derived_file import DerivedFile
from kit.emit.extra import NOT_PREDICTED
from kit.emit.markdown import code, plain
from kit.emit.trainer import AUTO, for_trainer, training_arguments
from kit.emit.trl import words
from kit.planner.plan import Plan
from kit.specs.extra import flat

_ROOT = "zero_optimization"
_OFFLOAD = {
    "device": "where it is kept between uses; the plan's choice (see plan.yaml, decisions)",
    "pin_memory": "page-locked memory is what a GPU's copy engines need; CPU processes would only lock it away",
}

RATIONALE: Mapping[str, str] = {
    "train_batch_size": "sequences of an optimizer step over all ranks; DeepSpeed asserts that it is the product of "
    "the next two and the ranks",
    "train_micro_batch_size_per_gpu": "sequences at once on a rank; the largest that is fast and fits, or pinned",
    "gradient_accumulation_steps": "what is left of the batch",
    "optimizer.type": "job.optimizer.name. Of AdamW DeepSpeed takes its FusedAdam on GPUs, and DeepSpeedCPUAdam where "
    "the optimizer is offloaded: any other would be refused there (zero_force_ds_cpu_optimizer)",
    "optimizer.params.lr": "a placeholder: the training loop sets it before every step, and there is no scheduler",
    "optimizer.params.betas": "job.optimizer",
    "optimizer.params.momentum": "of SGD: job.optimizer.beta1",
    "zero_allow_untested_optimizer": "SGD is torch's and 8-bit moments are bitsandbytes', which DeepSpeed runs "
    "under ZeRO only where it is told to",
    "optimizer.params.eps": "job.optimizer; added to the root of the second moment",
    "optimizer.params.weight_decay": "job.optimizer; for matrices: norms and biases are in a group without",
    "optimizer.params.torch_adam": "torch's AdamW: on CPUs DeepSpeed's own would be compiled at first use for the same "
    "result; in 16 bits without ZeRO its FusedAdam would flatten all master weights into one tensor",
    "gradient_clipping": "job.grad_clip: the global norm that gradients are scaled down to",
    "bf16.enabled": "bf16 weights and gradients; master weights and moments are fp32 by default",
    "bf16.bf16_master_weights_and_grads": "no fp32 copy of the weights: small updates are rounded away",
    "bf16.bf16_optimizer_states": "two bytes for each moment instead of four",
    "fp16.enabled": "fp16 weights and gradients, fp32 master weights and moments: for GPUs without bf16",
    "fp16.loss_scale": "0: the scale is found while training; fp16 gradients below 6e-8 would vanish without one",
    "fp16.initial_scale_power": "start at 2^16, near fp16's largest number: too large costs a few skipped steps, too "
    "small loses gradients",
    "fp16.loss_scale_window": "clean steps after which the scale doubles: a fiftieth of the run, from 50 to 1,000",
    "fp16.hysteresis": "one overflow is forgiven before the scale halves: a single bad batch says nothing about it",
    "fp16.min_loss_scale": "below it the run stops: a smaller scale would not help",
    "torch_autocast.enabled": "fp32 weights, cast for each GEMM (layout.autocast)",
    "torch_autocast.dtype": "job.precision",
    "torch_autocast.lower_precision_safe_modules": "modules whose gradients are sent in bf16: GEMMs; norms' "
    "and embeddings' stay fp32",
    "communication_data_type": "layout.gradient_compression: fp32 gradients are rounded to bf16 to be sent, which "
    "halves what a slow link carries",
    "tensor_parallel.autotp_size": "layout.tp: ranks over which DeepSpeed splits the matrices of a Hugging Face model",
    "tensor_parallel.vocab_parallel_lm_head": "the loss is computed outside of the model, from whole logits; with tied "
    "embeddings DeepSpeed would choose to split them",
    "tensor_parallel.partition_config.use_default_specs": "DeepSpeed's patterns do not know the names of peft's layers",
    "tensor_parallel.partition_config.layer_specs": "B of a column-parallel layer's adapter and A of a row-parallel "
    "one's are split like the weight; the other half is whole on every rank",
    "sequence_parallel_size": "layout.cp: ranks that split each sequence (Ulysses)",
    "seq_parallel_communication_data_type": "gradients are sent as without sequence parallelism; here DeepSpeed's own "
    "choice is fp32, twice the bytes of 16-bit ones",
    "data_types.grad_accum_dtype": "sums over micro batches in fp32; DeepSpeed's default, the weights' dtype, loses "
    "a micro batch's share once the sum is 256 times larger",
    "wall_clock_breakdown": "the training loop measures; these timers synchronise the device around every phase",
    "steps_per_print": "the training loop logs; null turns DeepSpeed's own line off",
    f"{_ROOT}.stage": "what ranks shard: 1 the optimizer state, 2 also gradients, 3 also weights",
    f"{_ROOT}.overlap_comm": "reduce a bucket while backward computes the next; CPU processes have no streams for it",
    f"{_ROOT}.contiguous_gradients": "gradients of a bucket are contiguous, and are sent without a copy",
    f"{_ROOT}.reduce_bucket_size": "elements; the largest matrix of a layer, so that it goes through the bucket, and "
    "as many as take ten times the ring's latency, so that messages are bandwidth, up to a fiftieth of the GPU's "
    "memory. The default, 5e8, is 1 GB",
    f"{_ROOT}.allgather_bucket_size": "elements gathered at once after a step; the size that serves reductions, even",
    f"{_ROOT}.stage3_prefetch_bucket_size": "elements prefetched during compute: the largest matrix; "
    "up to a layer where a matrix is too short a message for the link",
    f"{_ROOT}.stage3_max_live_parameters": "elements that may stay gathered: a twentieth of the GPU's memory, at most "
    "the model, at least two layers and the largest weight",
    f"{_ROOT}.zero_hpz_partition_size": "layout.zero_hpz: a second copy of the weights over the ranks of a node, from "
    "which backward gathers without the network between nodes",
    f"{_ROOT}.zero_quantized_weights": "layout.zero_quantized_weights: weights are gathered in int8, half of 16 bits; "
    "its kernels are CUDA's: parsed by DeepSpeed here, never run by kit",
    f"{_ROOT}.zero_quantized_gradients": "layout.zero_quantized_gradients: gradients are reduced in int4, a quarter "
    "of 16 bits, first inside nodes, then between them; its kernels are CUDA's: parsed here, never run by kit",
    f"{_ROOT}.stage3_param_persistence_threshold": "ten hidden sizes: norms and biases stay whole, because gathering "
    "them costs only latency; every matrix is larger",
    f"{_ROOT}.stage3_gather_16bit_weights_on_model_save": "without it save_16bit_model writes empty tensors",
    f"{_ROOT}.sub_group_size": "elements that a rank reads, steps and writes at a time, and that its pinned buffers "
    "hold: bandwidth, not latency, at 1.6 GB; the default, 1e9, pins 16 GB. Smaller on many ranks with weights on "
    "NVMe, where each rank pins a buffer for whole weights",
    f"{_ROOT}.stage3_max_reuse_distance": "a weight that is used again within so many elements is not released: those "
    "that may stay gathered. 0 with weights on NVMe, which keep their swap buffer until they are released: otherwise "
    "buffers run out in the first forward pass",
    **{f"{_ROOT}.offload_optimizer.{key}": reason for key, reason in _OFFLOAD.items()},
    **{f"{_ROOT}.offload_param.{key}": reason for key, reason in _OFFLOAD.items()},
    f"{_ROOT}.offload_optimizer.buffer_count": "a master, its gradient and two moments are in memory at once",
    f"{_ROOT}.offload_param.buffer_count": "one matrix in use, and the four that follow read meanwhile",
    f"{_ROOT}.offload_param.buffer_size": "elements of a rank's part of the largest weight: the least that works",
    f"{_ROOT}.offload_param.max_in_cpu": "all weights go to NVMe; the default, 1e9 on each rank, keeps them in memory",
    "aio.block_size": "1 MiB a request; DeepSpeed swaps nothing smaller",
    "aio.queue_depth": "requests in flight: four times what a rank's part of the disks delivers within their latency "
    "(cluster.nvme_gbytes_per_s, stated or measured); ds_nvme_tune measures better values",
    "aio.intra_op_parallelism": "threads of a rank: one for each 2 GB/s of its part of the disks; CPU rehearsals share "
    "few cores",
    "aio.single_submit": "submit requests in batches",
    "aio.overlap_events": "finished requests are collected while others are submitted",
}
"""Dotted key → why it has its value. A test checks that it has exactly the keys that kit emits."""

BY_TRAINER: Mapping[str, str] = {
    "train_batch_size": "the product of the next two and the ranks",
    "train_micro_batch_size_per_gpu": "`--per_device_train_batch_size`",
    "gradient_accumulation_steps": "`--gradient_accumulation_steps`",
    "optimizer.params.lr": "`--learning_rate`",
    "optimizer.params.betas": "`--adam_beta1` and `--adam_beta2`",
    "optimizer.params.eps": "`--adam_epsilon`",
    "optimizer.params.weight_decay": "`--weight_decay`; of all parameters, norms and biases too",
    "gradient_clipping": "`--max_grad_norm`",
    "bf16.enabled": "`--bf16 true`",
    f"{_ROOT}.stage3_param_persistence_threshold": "ten hidden sizes of the model: norms and biases stay whole, "
    "because gathering them costs only latency",
}
"""Dotted key of ``ds_config.trainer.json`` that is ``"auto"`` → what the Trainer fills in
(transformers/integrations/deepspeed.py)."""


def ds_config_page(plan: Plan) -> str:
    """Markdown with a row for each key, and the arguments that the Hugging Face Trainer needs together with
    ``ds_config.trainer.json``."""
    about = "A change of batch, stage, precision or offload belongs in the recipe; any other is honoured."
    on_disks = (
        "`nvme_path` is the run's (`run.nvme_path`): a run directory has it where the recipe names one outside a "
        "home directory. kit's own worker swaps to a directory of its own below it.",
        "",
    )
    keys = key_by_key(plan, "ds_config.json", ds_config(plan), about)
    return "\n".join([*keys, *on_disks * plan.layout.uses_nvme, *_trainer(plan)])


def key_by_key(plan: Plan, name: str, config: Mapping[str, Any], about: str) -> list[str]:
    """Lines with a reason for each key of a configuration of the plan. ``about``: a sentence for the reader."""
    return [
        f"# {name}, key by key",
        "",
        f"{plain(plan.model.name)} on {plan.cluster.num_gpus} x {plain(plan.cluster.gpu.name)}. Keys that are not "
        f"here keep DeepSpeed's default. {about}",
        "",
        "| key | value | reason |",
        "|---|---|---|",
        *(
            f"| {_cell(key)} | {_cell(json.dumps(value))} | {_reason(plan, key, value)} |"
            for key, value in flat(config).items()
        ),
        "",
    ]


def _reason(plan: Plan, key: str, value: Any) -> str:
    if value == AUTO:
        return f"the Trainer: {BY_TRAINER[key]}"
    return f"`extra` of the recipe: {NOT_PREDICTED}" if key in flat(plan.extra.deepspeed) else RATIONALE[key]


def _cell(text: str) -> str:
    """As code: a bar inside a table is not the table's (GFM 0.29, section 4.10)."""
    return code(text).replace("|", r"\|")


def _trainer(plan: Plan) -> list[str]:
    if not for_trainer(plan):
        return []
    arguments = " ".join(words(training_arguments(plan)))
    return [
        "## With the Hugging Face Trainer",
        "",
        "`ds_config.trainer.json` leaves to the Trainer what it fills in from its own arguments, and refuses to differ",
        "from. With these it fills in the numbers above:",
        "",
        f"    --deepspeed ds_config.trainer.json {arguments}",
        "",
        *_on_cpu(plan),
    ]


def _on_cpu(plan: Plan) -> list[str]:
    if plan.cluster.gpu.device != "cpu" or plan.layout.zero_stage < 3:
        return []
    return [
        "On CPU processes ZeRO-3 stops with `--use_cpu`: accelerate then joins the processes without DeepSpeed, and",
        "transformers splits the model over one. Leave it out, and join them by gloo before the script starts.",
        "",
    ]


FILES = (DerivedFile("ds_config.md", ds_config_page, runs_deepspeed),)

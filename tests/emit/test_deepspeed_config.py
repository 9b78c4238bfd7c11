"""ds_config.json and its variants, key by key: the value by hand, from the layout and from DeepSpeed's own meaning of
the key, and both sides of each branch. DeepSpeed's parser reads such files in tests/planning/test_accepted.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.emit.deepspeed import ds_config
from kit.emit.deepspeed_rationale import RATIONALE, ds_config_page, flat
from kit.specs.catalog import parse_cluster
from kit.specs.job import OptimizerSpec
from tests.emit.plans import ADAM, ADAPTED, ON_CPU, ZERO2, ZERO3, check_settings, plan_of

OPTIMIZERS = {name: {"optimizer": OptimizerSpec(name=name)} for name in ("sgd", "lion", "adafactor", "adamw-8bit")}
DISKS = replace(parse_cluster("8xH100"), nvme_gbytes_per_s=40.0, nvme_gib=20_000.0)
NVME = {
    "cluster": DISKS, "offload_optimizer": "nvme", "offload_param": "nvme", "sub_group_size": 17,
    "optimizer_buffer_count": 5, "param_buffer_count": 6, "param_buffer_size": 19,
}  # fmt: skip
SIZES = {
    "reduce_bucket_size": 7, "stage3_prefetch_bucket_size": 11, "stage3_max_live_parameters": 13,
    "stage3_param_persistence_threshold": 15,
}  # fmt: skip
BATCH = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
QUIET = {"wall_clock_breakdown": False, "steps_per_print": None}
ZERO_2 = "zero_optimization."
DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero2": (
        ZERO2 | {"job": {"optimizer": ADAM, "learning_rate": 1e-4, "grad_clip": 0.5}, "reduce_bucket_size": 7},
        {"only": True, **BATCH, "optimizer.type": "AdamW", "optimizer.params.lr": 1e-4,
         "optimizer.params.betas": [0.8, 0.97], "optimizer.params.eps": 1e-7, "optimizer.params.weight_decay": 0.03,
         "gradient_clipping": 0.5, ZERO_2 + "stage": 2, ZERO_2 + "overlap_comm": True,
         ZERO_2 + "contiguous_gradients": True, ZERO_2 + "reduce_bucket_size": 7,
         # stage_1_and_2.py asserts an even size
         ZERO_2 + "allgather_bucket_size": 8, "bf16.enabled": True, "data_types.grad_accum_dtype": "fp32", **QUIET},
    ),
    "zero3": (
        ZERO3 | SIZES | {"zero_hpz": 4, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        {ZERO_2 + "stage": 3, ZERO_2 + "reduce_bucket_size": 7, ZERO_2 + "allgather_bucket_size": ...,
         ZERO_2 + "stage3_prefetch_bucket_size": 11, ZERO_2 + "stage3_max_live_parameters": 13,
         ZERO_2 + "stage3_max_reuse_distance": 13, ZERO_2 + "stage3_param_persistence_threshold": 15,
         ZERO_2 + "stage3_gather_16bit_weights_on_model_save": True, ZERO_2 + "zero_hpz_partition_size": 4,
         ZERO_2 + "zero_quantized_weights": True, ZERO_2 + "zero_quantized_gradients": True,
         ZERO_2 + "sub_group_size": ..., "aio.block_size": ..., ZERO_2 + "offload_optimizer.device": ...,
         ZERO_2 + "offload_param.device": ..., "zero_allow_untested_optimizer": ..., "torch_autocast.enabled": ...,
         "sequence_parallel_size": ..., "tensor_parallel.autotp_size": ..., "communication_data_type": ...},
    ),
    "zero3 alone": (
        ZERO3,
        {ZERO_2 + "zero_hpz_partition_size": ..., ZERO_2 + "zero_quantized_weights": ...,
         ZERO_2 + "zero_quantized_gradients": ...},
    ),
    "nvme": (
        # 40 GB/s of 8 ranks are 5 each: ceil(5 / 2) threads of 2 GB/s; the depth is a power of two (deepspeed_sizes.py)
        ZERO3 | SIZES | NVME,
        {ZERO_2 + "sub_group_size": 17, ZERO_2 + "stage3_max_reuse_distance": 0,
         ZERO_2 + "offload_optimizer.device": "nvme", ZERO_2 + "offload_optimizer.pin_memory": True,
         ZERO_2 + "offload_optimizer.buffer_count": 5, ZERO_2 + "offload_param.device": "nvme",
         ZERO_2 + "offload_param.pin_memory": True, ZERO_2 + "offload_param.buffer_count": 6,
         ZERO_2 + "offload_param.buffer_size": 19, ZERO_2 + "offload_param.max_in_cpu": 0,
         "aio.block_size": 1 << 20, "aio.intra_op_parallelism": 3, "aio.single_submit": False,
         "aio.overlap_events": True},
    ),
    "host": (
        ZERO3 | {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {ZERO_2 + "offload_optimizer.device": "cpu", ZERO_2 + "offload_optimizer.buffer_count": ...,
         ZERO_2 + "offload_param.device": "cpu", ZERO_2 + "offload_param.buffer_count": ...,
         ZERO_2 + "offload_param.buffer_size": ..., ZERO_2 + "offload_param.max_in_cpu": ..., "aio.block_size": ...,
         "optimizer.params.torch_adam": ...},
    ),
    "zero0": (
        ZERO2 | {"zero_stage": 0},
        # engine.py refuses an accumulation dtype there; FusedAdam would flatten all master weights
        {ZERO_2 + "stage": 0, ZERO_2 + "overlap_comm": ..., ZERO_2 + "contiguous_gradients": ...,
         ZERO_2 + "reduce_bucket_size": ..., ZERO_2 + "allgather_bucket_size": ..., "data_types.grad_accum_dtype": ...,
         "optimizer.params.torch_adam": True},
    ),
    "zero0 sgd": (
        ZERO2 | {"zero_stage": 0, "job": OPTIMIZERS["sgd"]},
        {"optimizer.params.torch_adam": ..., "zero_allow_untested_optimizer": ...},
    ),
    "zero1": (
        ZERO2 | {"zero_stage": 1, "reduce_bucket_size": 7},
        {ZERO_2 + "stage": 1, "data_types.grad_accum_dtype": "fp32", ZERO_2 + "allgather_bucket_size": 8,
         ZERO_2 + "contiguous_gradients": True, ZERO_2 + "stage3_prefetch_bucket_size": ...},
    ),
    "one micro batch": (ZERO2 | {"gradient_accumulation_steps": 1}, {"data_types.grad_accum_dtype": ...}),
    "fp32 at stage 0": (
        ZERO2 | {"zero_stage": 0, "job": {"precision": "fp32"}},
        {"bf16.enabled": ..., "fp16.enabled": ..., "optimizer.params.torch_adam": ...,
         "data_types.grad_accum_dtype": ...},
    ),
    "fp32": (ZERO2 | {"job": {"precision": "fp32"}}, {"bf16.enabled": ..., "data_types.grad_accum_dtype": ...}),
    "autocast": (
        ZERO2 | {"autocast": True},
        {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16", "bf16.enabled": ...,
         "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"], "data_types.grad_accum_dtype": ...},
    ),
    "bf16 states": (
        ZERO2 | {"optimizer_state_dtype": "bf16", "offload_optimizer": "cpu"} | ON_CPU,
        {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True,
         "optimizer.params.torch_adam": ...},  # offloaded bf16 masters take DeepSpeedCPUAdam alone
    ),
    "bf16 states at home": (
        ZERO2 | {"optimizer_state_dtype": "bf16"} | ON_CPU, {"optimizer.params.torch_adam": True}
    ),
    "fp32 states": (
        ZERO2, {"bf16.bf16_master_weights_and_grads": ..., "bf16.bf16_optimizer_states": ..., "bf16.enabled": True}
    ),
    "cpu": (
        ZERO3 | ON_CPU | {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {ZERO_2 + "overlap_comm": False, ZERO_2 + "offload_optimizer.pin_memory": False,
         ZERO_2 + "offload_param.pin_memory": False, "optimizer.params.torch_adam": True},
    ),
    # a fiftieth of the steps, 4096 x 48 tokens each, between 50 and 1,000
    "fp16": (
        ZERO2 | {"job": {"precision": "fp16", "total_tokens": 4096 * 48 * 10_000}},
        {"fp16.enabled": True, "fp16.loss_scale": 0, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 200,
         "fp16.hysteresis": 2, "fp16.min_loss_scale": 1, "bf16.enabled": ..., "data_types.grad_accum_dtype": "fp32"},
    ),
    "short fp16": (
        ZERO2 | {"job": {"precision": "fp16", "total_tokens": 4096 * 48 * 100}}, {"fp16.loss_scale_window": 50}
    ),
    "long fp16": (
        ZERO2 | {"job": {"precision": "fp16", "total_tokens": 4096 * 48 * 60_000}}, {"fp16.loss_scale_window": 1000}
    ),
    "ulysses": (
        ZERO3 | {"dp": 2, "cp": 4, "cp_comm_type": "a2a"},
        {"sequence_parallel_size": 4, "seq_parallel_communication_data_type": "bf16", "train_batch_size": 12},
    ),
    "ulysses by two": (
        ZERO3 | {"dp": 4, "cp": 2, "cp_comm_type": "a2a"}, {"sequence_parallel_size": 2, "train_batch_size": 24}
    ),
    "autotp": (
        ZERO2 | {"dp": 2, "tp": 4},
        {"train_batch_size": ..., "train_micro_batch_size_per_gpu": 2, "tensor_parallel.autotp_size": 4,
         "tensor_parallel.vocab_parallel_lm_head": False, "tensor_parallel.partition_config.layer_specs": ...,
         "sequence_parallel_size": ..., "seq_parallel_communication_data_type": ...},
    ),
    "autotp of adapters": (
        ZERO2 | {"dp": 2, "tp": 4, "job": {"objective": "sft", "lora": ADAPTED}},
        {"tensor_parallel.partition_config.use_default_specs": False,
         "tensor_parallel.partition_config.layer_specs": [
             {"patterns": [r".*\.(q|k|v|gate|up)_proj(\.base_layer|\.lora_B\.default)?\.weight$"],
              "partition_type": "column"},
             {"patterns": [r".*\.(o|down)_proj(\.base_layer|\.lora_A\.default)?\.weight$"], "partition_type": "row"},
         ]},
    ),
    "zero over megatron": (
        ZERO2 | {"dp": 2, "tp": 4, "implementation": "local"},
        {"tensor_parallel.autotp_size": ..., "train_batch_size": 12},
    ),
    "compressed": (
        ZERO2 | {"gradient_compression": "bf16", "job": {"precision": "fp32"}}, {"communication_data_type": "bf16"}
    ),
    "sgd": (
        ZERO2 | {"job": {"optimizer": OptimizerSpec(name="sgd", beta1=0.6, weight_decay=0.03)}},
        {"optimizer.type": "SGD", "optimizer.params.momentum": 0.6, "optimizer.params.weight_decay": 0.03,
         "optimizer.params.betas": ..., "optimizer.params.eps": ..., "zero_allow_untested_optimizer": True},
    ),
    "lion": (
        ZERO2 | {"job": OPTIMIZERS["lion"]},
        {"optimizer.type": "Lion", "optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": ...,
         "optimizer.params.lr": 3e-4, "zero_allow_untested_optimizer": ...},
    ),
    "adafactor": (
        ZERO2 | {"job": OPTIMIZERS["adafactor"]},
        {"optimizer.type": "Adafactor", "optimizer.params.betas": ..., "optimizer.params.momentum": ...,
         "optimizer.params.eps": ..., "zero_allow_untested_optimizer": ...},
    ),
    "adamw-8bit": (
        ZERO2 | {"job": OPTIMIZERS["adamw-8bit"]}, {"optimizer.type": ..., "zero_allow_untested_optimizer": True}
    ),
}  # fmt: skip
AUTO = "auto"
OF_TRAINER = {
    "auto": (
        ZERO3 | SIZES | {"job": {"optimizer": ADAM}},
        {**dict.fromkeys(BATCH, AUTO), "gradient_clipping": AUTO, "optimizer.type": "AdamW",
         "optimizer.params.lr": AUTO, "optimizer.params.betas": AUTO, "optimizer.params.eps": AUTO,
         "optimizer.params.weight_decay": AUTO, "bf16.enabled": AUTO, ZERO_2 + "reduce_bucket_size": 7,
         ZERO_2 + "stage3_prefetch_bucket_size": 11, ZERO_2 + "stage3_param_persistence_threshold": AUTO},
    ),
    "zero2": (
        ZERO2 | {"job": {"precision": "fp16"}},
        {"fp16.enabled": AUTO, "fp16.loss_scale": 0, ZERO_2 + "stage3_param_persistence_threshold": ...,
         ZERO_2 + "stage": 2, "bf16.enabled": ...},
    ),
    "sgd": (
        ZERO2 | {"job": OPTIMIZERS["sgd"]},
        {"optimizer.params.lr": AUTO, "optimizer.params.momentum": 0.9, "optimizer.params.betas": ...},
    ),
    "adamw-8bit": (ZERO2 | {"job": OPTIMIZERS["adamw-8bit"]}, {"optimizer.type": ...}),
    "torch's adam": (
        ZERO2 | ON_CPU, {"optimizer.params.torch_adam": True, "optimizer.params.lr": AUTO, "bf16.enabled": AUTO}
    ),
}  # fmt: skip
OWN = {
    "offloaded": (
        ZERO2 | {"offload_optimizer": "cpu"},
        {**dict.fromkeys(BATCH, AUTO), "gradient_clipping": 1.0, "optimizer.type": ..., "optimizer.params.lr": ...,
         "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": ...},
    ),
    "on a cpu": (ZERO2 | ON_CPU, {"zero_force_ds_cpu_optimizer": ...}),
    "offloaded on a cpu": (ZERO2 | ON_CPU | {"offload_optimizer": "cpu"}, {"zero_force_ds_cpu_optimizer": False}),
}  # fmt: skip
DEEPCOMPILE = {"deepcompile": (ZERO2, {"compile.deepcompile": True, "train_batch_size": 48})}
SUPEROFFLOAD = {
    "superoffload": (
        ZERO3 | {"cluster": "8xGH200-96", "offload_optimizer": "cpu"},
        {ZERO_2 + "offload_optimizer.device": "cpu", ZERO_2 + "offload_optimizer.super_offload": True,
         ZERO_2 + "offload_optimizer.cpuadam_cores_perc": 0.9, ZERO_2 + "stage": 3},
    ),
}  # fmt: skip
TABLES = (
    ("ds_config.json", "", DEEPSPEED),
    ("ds_config.trainer.json", "", OF_TRAINER),
    ("ds_config.own_optimizer.json", "", OWN),
    ("ds_config.deepcompile.json", "deepcompile", DEEPCOMPILE),
    ("ds_config.superoffload.json", "superoffload", SUPEROFFLOAD),
)
CASES = {f"{name}: {case}": (name, target, *both) for name, target, table in TABLES for case, both in table.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_its_value(case: str, tmp_path: Path) -> None:
    check_settings(CASES[case], tmp_path)


def test_every_key_has_a_reason_and_every_reason_a_key() -> None:
    assert {key for plan, _ in DEEPSPEED.values() for key in flat(ds_config(plan_of(**plan)))} == RATIONALE.keys()


PAGES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "the Trainer's": (
        ZERO2 | {"job": {"epochs": 2.5, "objective": "sft"}},
        ["llama-3.1-8b on 8 x H100.", "| `zero_optimization.stage` | `2` |", "| `steps_per_print` | `null` |",
         "--deepspeed ds_config.trainer.json --per_device_train_batch_size 2 --gradient_accumulation_steps 3 ",
         " --bf16 true ", "--gradient_checkpointing true", "--num_train_epochs 2.5"],
        ["nvme_path", "--use_cpu", "ZeRO-3 stops"],
    ),
    "zero3 on cpus": (ZERO3 | ON_CPU, ["--use_cpu true", "ZeRO-3 stops with `--use_cpu`"], []),
    "zero2 on cpus": (ZERO2 | ON_CPU, ["--use_cpu true"], ["ZeRO-3 stops"]),
    "zero3 on gpus": (ZERO3, ["--per_device_train_batch_size"], ["ZeRO-3 stops"]),
    "disks": (ZERO3 | NVME, ["`nvme_path` is the run's"], []),
    # a bar inside a table, even in code, is not the table's (GFM 0.29, section 4.10)
    "split": (
        ZERO2 | {"dp": 2, "tp": 4, "job": {"lora": ADAPTED}}, [r"\\.(q\|k\|v\|gate\|up)_proj"], ["(q|k", "Trainer"]
    ),
    "sequences": (ZERO3 | {"dp": 2, "cp": 4, "cp_comm_type": "a2a"}, [], ["Trainer"]),
    "over megatron": (ZERO2 | {"implementation": "local"}, [], ["Trainer"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PAGES)
def test_the_page_has_the_reasons_and_the_trainers_arguments(case: str) -> None:
    plan, has, lacks = PAGES[case]
    page = ds_config_page(plan_of(**plan))
    assert ([text for text in has if text not in page], [text for text in lacks if text in page]) == ([], [])


def test_an_empty_section_is_a_key() -> None:
    assert flat({"a": {}, "b": {"c": 1, "d": {"e": None}}}) == {"a": {}, "b.c": 1, "b.d.e": None}

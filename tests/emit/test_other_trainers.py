"""Files for accelerate and for other training programs hold the plan's batch, sharding, precision and recomputation,
key by key. Their own parsers read them in ``tests.system.other_trainers``; accelerate's, here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from kit.emit.accelerate import PLAN_OWNED_KEYS, accelerate_config
from kit.emit.run_directory import files_of
from kit.errors import EngineError
from tests.emit.plans import ADAPTED, DENSE, FSDP2, IN_8_BITS, QLORA, SFT, ZERO2, ZERO3, Case, check_settings, plan_of
from tests.support.refusals import refusal

START = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "machine_rank": 0, "main_training_function": "main",
    "rdzv_backend": "static", "same_network": True,
}  # fmt: skip
ACCELERATE = {
    "zero3": (
        ZERO3,
        {"only": True, **START, "use_cpu": False, "num_machines": 1, "num_processes": 8, "main_process_port": 0,
         "distributed_type": "DEEPSPEED", "deepspeed_config.deepspeed_config_file": "ds_config.json",
         "deepspeed_config.zero3_init_flag": True},
    ),
    "zero2 of two nodes": (
        ZERO2 | {"cluster": "16xH100", "dp": 16},
        {"num_machines": 2, "num_processes": 16, "main_process_ip": "node-0", "main_process_port": 29500,
         "deepspeed_config.zero3_init_flag": False, "deepspeed_config.deepspeed_multinode_launcher": "standard"},
    ),
    "fsdp2": (
        FSDP2,
        {"only": True, **START, "use_cpu": False, "num_machines": 1, "num_processes": 8, "main_process_port": 0,
         "distributed_type": "FSDP", "fsdp_config.fsdp_version": 2,
         "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
         "fsdp_config.fsdp_reshard_after_forward": True, "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
         "fsdp_config.fsdp_cpu_ram_efficient_loading": True, "fsdp_config.fsdp_activation_checkpointing": False,
         "mixed_precision": "bf16"},
    ),
    # ZeRO-2: weights stay gathered between forward and backward
    "fsdp2 at stage 2": (
        FSDP2 | {"zero_stage": 2, "recompute": "full", "offload_param": "cpu"},
        {"fsdp_config.fsdp_reshard_after_forward": False, "fsdp_config.fsdp_activation_checkpointing": True,
         "fsdp_config.fsdp_offload_params": True},
    ),
    "ddp": (
        FSDP2 | {"zero_stage": 0, "job": {"precision": "fp32"}, "cluster": "2xcpu", "dp": 2},
        {"distributed_type": "MULTI_GPU", "fsdp_config.fsdp_version": ..., "mixed_precision": "no", "use_cpu": True,
         "num_processes": 2},
    ),
    "fp8": (FSDP2 | {"job": {"precision": "fp8"}}, {"mixed_precision": "bf16"}),
}  # fmt: skip
ADAMS = {
    "learning_rate": 2e-5, "adam_beta1": 0.8, "adam_beta2": 0.97, "adam_epsilon": 1e-7, "weight_decay": 0.03,
    "max_grad_norm": 0.7, "gradient_accumulation_steps": 3,
}  # fmt: skip
OF_FSDP = "fsdp_config."
OTHERS: dict[str, Case] = {
    "accelerate": (
        "accelerate.parallelism.yaml", "accelerate-parallelism",
        FSDP2 | {"cluster": "16xH100", "dp": 4, "tp": 2, "cp": 2},
        {"parallelism_config.parallelism_config_dp_replicate_size": 1,
         "parallelism_config.parallelism_config_dp_shard_size": 4, "parallelism_config.parallelism_config_tp_size": 2,
         "parallelism_config.parallelism_config_cp_size": 2, "num_processes": 16, "distributed_type": "FSDP"},
    ),
    "axolotl on FSDP2": (
        "axolotl.yaml", "axolotl", FSDP2 | {"job": SFT | {"epochs": 2.5}},
        {"only": True, "base_model": "REPLACE-ME", "datasets": [{"path": "REPLACE-ME", "type": "chat_template"}],
         "sequence_len": 2048, "micro_batch_size": 2, "num_epochs": 2.5, "optimizer": "adamw_torch",
         "lr_scheduler": "cosine", **ADAMS, "gradient_checkpointing": False, "bf16": True, "fp16": False,
         "fsdp_version": 2, OF_FSDP + "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
         OF_FSDP + "reshard_after_forward": True, OF_FSDP + "state_dict_type": "SHARDED_STATE_DICT",
         OF_FSDP + "cpu_ram_efficient_loading": True, "dp_shard_size": 8},
    ),
    "axolotl on ZeRO": (
        "axolotl.yaml", "axolotl", ZERO2 | {"job": SFT | {"objective": "pretrain", "precision": "fp16"}},
        {"deepspeed": "ds_config.trainer.json", "fsdp_version": ..., "dp_shard_size": ..., "num_epochs": 1,
         "datasets": [{"path": "REPLACE-ME", "type": "completion"}], "gradient_checkpointing": True, "bf16": False,
         "fp16": True, "adapter": ..., OF_FSDP + "auto_wrap_policy": ...},
    ),
    "axolotl with adapters": (
        "axolotl.yaml", "axolotl", FSDP2 | {"job": SFT | {"lora": ADAPTED}, "offload_param": "cpu"},
        {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": ..., "lora_r": 8, "lora_alpha": 24,
         "lora_dropout": 0.1,
         "lora_target_modules": ["q_proj", "v_proj"], "lora_target_linear": ..., "peft_use_rslora": ...,
         "peft_use_dora": ..., OF_FSDP + "offload_params": True},
    ),
    "axolotl in 8 bits": (
        "axolotl.yaml", "axolotl", ZERO2 | {"job": SFT | {"lora": IN_8_BITS}},
        {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True},
    ),
    "llamafactory in 8 bits": (
        "llamafactory.yaml", "llamafactory", ZERO2 | {"job": SFT | {"lora": IN_8_BITS}},
        {"quantization_bit": 8, "quantization_method": "bnb"},
    ),
    "ms-swift in 8 bits": (
        "ms_swift.yaml", "ms-swift", ZERO2 | {"job": SFT | {"lora": IN_8_BITS}},
        {"quant_method": "bnb", "quant_bits": 8},
    ),
    "axolotl in 4 bits on DDP": (
        "axolotl.yaml", "axolotl", FSDP2 | {"zero_stage": 0, "job": SFT | {"lora": QLORA}},
        {"adapter": "qlora", "load_in_4bit": True, "lora_target_modules": ..., "lora_target_linear": True,
         "peft_use_rslora": True, "peft_use_dora": True, "fsdp_version": ..., "dp_shard_size": ..., "deepspeed": ...},
    ),
    "axolotl's kernels": (
        "axolotl.yaml", "axolotl", FSDP2 | {"chunked_loss": True, "compile_layers": True},
        {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True,
         "torch_compile": True},
    ),
    "ms-swift's kernels": (
        "ms_swift.yaml", "ms-swift", FSDP2 | {"chunked_loss": True}, {"use_liger_kernel": True, "torch_compile": ...},
    ),
    "llamafactory": (
        "llamafactory.yaml", "llamafactory", FSDP2 | {"job": SFT},
        {"only": True, "stage": "sft", "do_train": True, "model_name_or_path": "REPLACE-ME", "dataset": "REPLACE-ME",
         "template": "default", "cutoff_len": 2048, "output_dir": "llamafactory", "finetuning_type": "full", **ADAMS,
         "per_device_train_batch_size": 2, "bf16": True, "disable_gradient_checkpointing": True},
    ),
    "llamafactory in 4 bits": (
        "llamafactory.yaml", "llamafactory", ZERO2 | {"job": SFT | {"lora": QLORA}},
        {"finetuning_type": "lora", "lora_rank": 8, "lora_alpha": 24, "lora_dropout": 0.0, "lora_target": "all",
         "quantization_bit": 4, "quantization_method": "bnb", "use_rslora": True, "use_dora": True,
         "deepspeed": "ds_config.trainer.json", "disable_gradient_checkpointing": ..., "gradient_checkpointing": ...},
    ),
    "llamafactory pretrains": (
        "llamafactory.yaml", "llamafactory", ZERO2 | {"autocast": True},
        {"stage": "pt", "bf16": True, "lora_rank": ..., "lora_target": ..., "quantization_bit": ...},
    ),
    "llamafactory with adapters": (
        "llamafactory.yaml", "llamafactory", ZERO2 | {"job": SFT | {"lora": ADAPTED, "precision": "fp32"}},
        {"lora_target": "q_proj,v_proj", "quantization_bit": ..., "use_rslora": ..., "use_dora": ..., "bf16": ...,
         "fp32": ...},
    ),
    "ms-swift": (
        "ms_swift.yaml", "ms-swift", FSDP2 | {"job": SFT | {"epochs": 3.0}},
        {"only": True, "model": "REPLACE-ME", "dataset": ["REPLACE-ME"], "max_length": 2048, "torch_dtype": "bfloat16",
         "output_dir": "ms-swift", "tuner_type": "full", **ADAMS, "per_device_train_batch_size": 2, "bf16": True,
         "gradient_checkpointing": False, "num_train_epochs": 3.0},
    ),
    "ms-swift in 4 bits": (
        "ms_swift.yaml", "ms-swift", ZERO2 | {"job": SFT | {"lora": QLORA, "precision": "fp16"}},
        {"tuner_type": "lora", "target_modules": ["all-linear"], "quant_method": "bnb", "quant_bits": 4,
         "gradient_checkpointing": True, "torch_dtype": "float16", "deepspeed": "ds_config.trainer.json"},
    ),
    "ms-swift with adapters": (
        "ms_swift.yaml", "ms-swift", ZERO2 | {"job": SFT | {"lora": ADAPTED, "precision": "fp32"}},
        {"target_modules": ["q_proj", "v_proj"], "quant_bits": ..., "torch_dtype": "float32"},
    ),
    "torchtitan on FSDP2": (
        "torchtitan.sh", "torchtitan",
        FSDP2 | {"cluster": "16xH100", "dp": 8, "tp": 2, "job": {"seq_length": 2048, "grad_clip": 0.7}},
        {"training.num-tokens-per-microbatch-per-dp-rank": "4096", "training.num-tokens-per-train-step": "98304",
         "training.max-context-length": "2048", "training.max-norm": "0.7",
         "training.mixed-precision-param": "bfloat16", "parallelism.data-parallel-replicate-degree": "1",
         "parallelism.data-parallel-shard-degree": "8", "parallelism.tensor-parallel-degree": "2",
         "parallelism.context-parallel-degree": "1", "module": "llama3", "config": "llama3_8b",
         "parallelism.pipeline-parallel-degree": "1 activation-checkpoint:none"},
    ),
    "torchtitan on DDP": (
        "torchtitan.sh", "torchtitan",
        FSDP2 | {"model": "qwen3-0.6b", "zero_stage": 0, "recompute": "full", "job": {"precision": "fp32"}},
        {"training.mixed-precision-param": "float32", "parallelism.data-parallel-replicate-degree": "8",
         "parallelism.data-parallel-shard-degree": "1", "module": "qwen3", "config": "qwen3_0_6b",
         "parallelism.pipeline-parallel-degree": "1 activation-checkpoint:full"},
    ),
}  # fmt: skip
OWN: Case = (
    "accelerate.own_optimizer.yaml", "", ZERO3,
    {"distributed_type": "DEEPSPEED", "deepspeed_config.deepspeed_config_file": "ds_config.own_optimizer.json",
     "deepspeed_config.zero3_init_flag": True, "num_processes": 8},
)  # fmt: skip
CASES = (
    OTHERS
    | {"own optimizer": OWN}
    | {f"accelerate.yaml: {case}": ("accelerate.yaml", "", *both) for case, both in ACCELERATE.items()}
)


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_its_value(case: str, tmp_path: Path) -> None:
    check_settings(CASES[case], tmp_path)


@pytest.mark.parametrize(
    ("name", "target", "plan", "read"),
    [
        ("accelerate.yaml", "", ZERO3, {"use_deepspeed": True, "deepspeed_config_file": "ds_config.json"}),
        ("accelerate.yaml", "", FSDP2, {"use_fsdp": True, "fsdp_version": 2, "fsdp_reshard_after_forward": True}),
        ("accelerate.yaml", "", FSDP2 | {"zero_stage": 0}, {"multi_gpu": True, "use_fsdp": False}),
        (
            "accelerate.parallelism.yaml", "accelerate-parallelism", FSDP2 | {"cluster": "16xH100", "tp": 2},
            {"use_parallelism_config": True, "parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 8},
        ),
    ],
)  # fmt: skip
def test_accelerates_launcher_reads_them(
    name: str, target: str, plan: dict[str, Any], read: dict[str, Any], tmp_path: Path
) -> None:
    made = plan_of(**plan)
    (tmp_path / name).write_text(files_of(made, [target] if target else [])[name])
    words = ["--config_file", str(tmp_path / name), "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert args.num_processes == made.layout.world_size
    assert {key: getattr(args, key) for key in read} == read


@pytest.mark.parametrize("plan", [DENSE, FSDP2 | {"cluster": "1xH100", "dp": 1}])
def test_accelerate_does_not_start_the_others(plan: dict[str, Any]) -> None:
    assert "use torchrun" in refusal(EngineError, accelerate_config, plan_of(**plan))
    assert "accelerate.yaml" not in files_of(plan_of(**plan))


def test_guarded_keys_are_emitted() -> None:
    config = accelerate_config(plan_of(**ZERO3)) | accelerate_config(plan_of(**FSDP2))
    assert {key for key in PLAN_OWNED_KEYS if "." not in key} <= config.keys()

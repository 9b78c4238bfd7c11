"""For every rule of lint a configuration that it must speak of, and a neighbour that it must not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
STAGE_2: dict[str, Any] = BASE | {"zero_optimization": {"stage": 2}}
STAGE_3: dict[str, Any] = BASE | {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}


@dataclass(frozen=True)
class LintCase:
    """``bad`` raises the rule, ``good`` does not; text where JSON itself is the matter."""

    rule: str
    bad: dict[str, Any] | str
    good: dict[str, Any] | str = field(default_factory=lambda: BASE)
    severity: str = "error"
    context: dict[str, str] = field(default_factory=dict)
    """model, gpus, reader."""
    good_context: dict[str, str] | None = None
    refused: bool = False
    """DeepSpeed's own parser raises for it."""


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    """A configuration of one stage."""
    gather = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return BASE | {"zero_optimization": {"stage": stage, **gather, **keys}}


AIO = {"aio": {"block_size": 1048576, "queue_depth": 32}}
CPU = {"device": "cpu"}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}

DEEPSPEED_CASES = (
    LintCase("json-syntax", '{"train_batch_size": 8, // eight\n}', '{"train_batch_size": 8}', "warning"),
    LintCase("duplicate-key", '{"train_batch_size": 8, "train_batch_size": 16}', '{"train_batch_size": 8}'),
    LintCase("unknown-key", BASE | {"gradient_acumulation_steps": 2}, BASE | {"gradient_accumulation_steps": 2}),
    LintCase("unknown-key", zero(2, overlap_com=True), zero(2, overlap_comm=True), refused=True),
    LintCase("unknown-key", BASE | {"overlap_comm": True}, zero(2, overlap_comm=True)),
    LintCase("unknown-key", BASE | {"aio": {"thread_count": 4}}, BASE | {"aio": {"intra_op_parallelism": 4}}),
    LintCase("removed-key", BASE | {"amp": {"enabled": True}}, BASE | {"fp16": {"enabled": True}}, refused=True),
    LintCase("removed-key", zero(3, mics_shard_size=8), zero(3, zero_hpz_partition_size=8), refused=True),
    LintCase("deprecated-key", zero(2, cpu_offload=True), zero(2, offload_optimizer=CPU) | ADAMW, "warning"),
    LintCase("deprecated-key", BASE | {"zero_optimization": True}, zero(1), "warning"),
    LintCase("deprecated-key", BASE | {"bfloat16": {"enabled": True}}, BASE | {"bf16": {"enabled": True}}, "warning"),
    LintCase("text-value", BASE | {"fp16": {"enabled": "true"}}, BASE | {"fp16": {"enabled": True}}),
    LintCase("text-value", {"train_batch_size": "8"}, {"train_batch_size": "auto"}),
    LintCase("value-range", zero(2, reduce_bucket_size=0), zero(2, reduce_bucket_size=1), refused=True),
    LintCase(
        "value-range",
        BASE | {"fp16": {"enabled": True, "initial_scale_power": 128}},
        BASE | {"fp16": {"enabled": True, "initial_scale_power": 32}},
    ),
    LintCase(
        "value-range",
        BASE | {"fp16": {"enabled": True, "min_loss_scale": 0}},
        BASE | {"fp16": {"enabled": False, "min_loss_scale": 0}},
        refused=True,
    ),
    LintCase("unknown-key", BASE | {"monitor_config": {}}, BASE | {"_monitor_config": {}}, "warning"),
    LintCase("not-read", {"feature_extractor_type": "ViT", "size": 30}, BASE, "warning"),
    LintCase(
        "not-read",
        {"vocab_size": 8, "hidden_size": 8, "torch_dtype": "bfloat16"},
        {"gradient_acumulation_steps": 8},
        "warning",
    ),
    LintCase("batch-missing", {"gradient_accumulation_steps": 2}, {"train_batch_size": 8}, refused=True),
    LintCase("batch-arithmetic", {"train_batch_size": 0}, {"train_batch_size": 8}, refused=True),
    # The batch often quoted for 800 GPUs of which 32 share a model: 2,048 is no multiple of 4 · 25.
    LintCase(
        "batch-arithmetic",
        {"train_batch_size": 2048, "train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 32}},
        {"train_batch_size": 2000, "train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 32}},
        context={"gpus": "800xH100"},
    ),
    LintCase(
        "batch-arithmetic",
        {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        refused=True,
    ),
    LintCase(
        "two-precisions",
        BASE | {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        BASE | {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
        refused=True,
    ),
    LintCase(
        "bf16-hardware",
        BASE | {"bf16": {"enabled": True}},
        BASE | {"bf16": {"enabled": True}},
        context={"gpus": "2xTitan-RTX"},
        good_context={"gpus": "2xRTX-4090"},
    ),
    LintCase(
        "static-loss-scale",
        BASE | {"fp16": {"enabled": True, "loss_scale": 1024}},
        BASE | {"fp16": {"enabled": True, "loss_scale": 0}},
        "warning",
    ),
    LintCase(
        "bf16-accumulation",
        STAGE_2 | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 64},
        STAGE_2
        | {
            "bf16": {"enabled": True},
            "gradient_accumulation_steps": 64,
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        "warning",
    ),
    LintCase("removed-optimizer", BASE | {"optimizer": {"type": "OneBitAdam"}}, BASE | ADAMW),
    LintCase(
        "gpu-optimizer-offloaded",
        zero(2, offload_optimizer=CPU) | {"optimizer": {"type": "Lamb"}, "zero_allow_untested_optimizer": True},
        zero(2, offload_optimizer=CPU) | ADAMW,
    ),
    LintCase("untested-optimizer", zero(2) | {"optimizer": {"type": "SGD"}}, BASE | {"optimizer": {"type": "SGD"}}),
    LintCase(
        "adam-is-adamw",
        BASE | {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}},
        BASE | {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}},
        "note",
    ),
    LintCase(
        "clipping-in-optimizer",
        BASE | {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        BASE | ADAMW | {"gradient_clipping": 1.0},
    ),
    LintCase(
        "client-optimizer-offloaded",
        zero(2, offload_optimizer=CPU),
        zero(2, offload_optimizer=CPU),
        "note",
        {"reader": "deepspeed"},
        {"reader": "accelerate"},
    ),
    LintCase("scheduler-name", BASE | {"scheduler": {"type": "WarmupLr"}}, BASE | {"scheduler": {"type": "WarmupLR"}}),
    LintCase("zero-stage", zero(4), zero(3), refused=True),
    LintCase(
        "zenflow-weights", zero(2, offload_optimizer=CPU, zenflow={"topk_ratio": 0.1}), zero(2, offload_optimizer=CPU)
    ),
    LintCase(
        "other-stage-key", zero(2, stage3_max_live_parameters=1e9), zero(3, stage3_max_live_parameters=1e9), "warning"
    ),
    LintCase("other-stage-key", zero(3, round_robin_gradients=True), zero(1, round_robin_gradients=True), "warning"),
    LintCase("offload-stage", zero(2, offload_param=CPU), zero(3, offload_param=CPU)),
    LintCase("offload-stage", zero(0, offload_optimizer=CPU), zero(1, offload_optimizer=CPU)),
    LintCase(
        "offload-stage",
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}) | AIO,
        zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}) | AIO,
    ),
    LintCase("nvme-path", zero(3, offload_param={"device": "nvme"}), zero(3, offload_param=CPU)),
    LintCase(
        "nvme-path",
        zero(3, offload_param={"device": "nvme", "nvme_path": "/no/such/disk"}) | AIO,
        zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}) | AIO,
        "note",
    ),
    LintCase(
        "nvme-aio",
        zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}),
        zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}) | AIO,
        "warning",
    ),
    LintCase("gather-on-save", BASE | {"zero_optimization": {"stage": 3}}, STAGE_3, "warning"),
    LintCase(
        "gather-on-save",
        BASE | {"zero_optimization": {"stage": 3}},
        BASE | {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}},
        "warning",
    ),
    LintCase("pipeline-zero", zero(3) | {"pipeline": {"stages": 4}}, zero(1) | {"pipeline": {"stages": 4}}, "note"),
    LintCase("checkpointing-unused", BASE | {"activation_checkpointing": {"profile": True}}, BASE, "note"),
    LintCase("auto-unfilled", BASE | {"steps_per_print": "auto"}, BASE | {"gradient_clipping": "auto"}),
    LintCase("auto-unfilled", zero(2, allgather_bucket_size="auto"), zero(2, reduce_bucket_size="auto"), "note"),
    LintCase(
        "auto-outside-trainer",
        zero(2, reduce_bucket_size="auto"),
        zero(2, reduce_bucket_size=5e8),
        "warning",
        {"reader": "deepspeed"},
    ),
    LintCase(
        "auto-outside-trainer",
        {"train_batch_size": "auto"},
        {"train_batch_size": "auto"},
        context={"reader": "deepspeed"},
        good_context={"reader": "trainer"},
    ),
    LintCase(
        "bucket-memory",
        zero(2, reduce_bucket_size=5e8),
        zero(2, reduce_bucket_size=1e7),
        "warning",
        context={"model": "gpt2"},
    ),
    LintCase("bucket-memory", zero(2, reduce_bucket_size=5e9), zero(2, reduce_bucket_size=5e8), "warning"),
    LintCase(
        "host-ram",
        zero(3, offload_optimizer=CPU, offload_param=CPU) | ADAMW,
        zero(3, offload_optimizer=CPU, offload_param=CPU) | ADAMW,
        context={"model": "llama-3-70b", "gpus": "8xA100-40"},
        good_context={"model": "llama-3-70b", "gpus": "32xA100-40"},
    ),
    # 80 GB assumed on nodes of 40.
    LintCase(
        "does-not-fit",
        STAGE_3 | {"bf16": {"enabled": True}},
        STAGE_3 | {"bf16": {"enabled": True}},
        context={"model": "llama-3-70b", "gpus": "8xA100-40"},
        good_context={"model": "llama-3.2-1b", "gpus": "8xA100-40"},
    ),
)

OFFLOADED = STAGE_3["zero_optimization"] | {"offload_optimizer": CPU | {"pin_memory": True}}
EIGHT = {"model": "llama-3.1-8b", "gpus": "8xH100"}
BF16 = BASE | ADAMW | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 8}
NVME = {"device": "nvme", "nvme_path": "/tmp"}
NVME_OF = STAGE_3 | AIO | {"bf16": {"enabled": True}}
CONSEQUENCE_CASES = (
    LintCase(
        "offload-for-nothing",
        BF16 | {"zero_optimization": OFFLOADED},
        BF16 | {"zero_optimization": OFFLOADED},
        "warning",
        EIGHT,
        {"model": "llama-3-70b", "gpus": "16xH100"},
    ),
    LintCase("stage-for-nothing", STAGE_3 | BF16, STAGE_2 | BF16, "warning", EIGHT),
    LintCase("memory-not-judged", STAGE_2, STAGE_2, "note", {"model": "llama-3.1-8b"}, {}),
    LintCase(
        "memory-not-judged",
        STAGE_2 | BF16 | {"tensor_parallel": {"autotp_size": 2}},
        STAGE_2 | BF16,
        "note",
        {"model": "llama-3.1-8b", "gpus": "8xH100"},
    ),
    LintCase(
        "buffer-size",
        NVME_OF | {"zero_optimization": NVME_OF["zero_optimization"] | {"offload_param": NVME | {"buffer_size": 1e6}}},
        NVME_OF | {"zero_optimization": NVME_OF["zero_optimization"] | {"offload_param": NVME | {"buffer_size": 1e8}}},
        "error",
        {"model": "llama-3.1-8b", "gpus": "8xH100"},
    ),
    LintCase("prediction", STAGE_2 | BF16, STAGE_2 | BF16, "note", EIGHT, {"model": "llama-3.1-8b"}),
)
"""What a configuration costs where a model and GPUs are given."""

LOCAL: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
    "num_machines": 1,
    "machine_rank": 0,
}
FILE = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


EIGHT_IN_BF16 = {"num_processes": 8, "mixed_precision": "bf16"}


def inline(**keys: Any) -> dict[str, Any]:
    """accelerate's YAML with the DeepSpeed choices in it."""
    return LOCAL | {"deepspeed_config": keys}


def fsdp(**keys: Any) -> dict[str, Any]:
    """accelerate's YAML with FSDP2, unless another version is given."""
    return LOCAL | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2} | keys}


ACCELERATE_CASES = (
    LintCase("unknown-key", LOCAL | {"num_proceses": 2}, LOCAL),
    LintCase("unknown-key", inline(zero_stages=2), inline(zero_stage=2)),
    LintCase("distributed-type", {"num_processes": 2}, LOCAL),
    LintCase("one-process", LOCAL | {"distributed_type": "MULTI_CPU"}, LOCAL | {"distributed_type": "MULTI_GPU"}),
    LintCase("machine-rank", LOCAL | {"machine_rank": 1}, LOCAL),
    LintCase("not-read", {"model_name_or_path": "gpt2", "learning_rate": 1e-4}, LOCAL, "warning"),
    LintCase("visible-devices", LOCAL | {"gpu_ids": "0"}, LOCAL | {"gpu_ids": "0,3"}),
    LintCase("visible-devices", LOCAL | {"gpu_ids": 0}, LOCAL | {"gpu_ids": "all"}),
    LintCase(
        "wrap-class",
        LOCAL | FSDP2 | {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}},
        LOCAL | FSDP2 | {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Embedding"}},
        context={"model": "llama-3.1-8b"},
    ),
    LintCase(
        "memory-not-judged",
        LOCAL | {"distributed_type": "MULTI_XPU"},
        LOCAL | {"distributed_type": "MULTI_GPU"},
        "note",
        {"model": "llama-3.2-1b", "gpus": "2xH100"},
    ),
    LintCase(
        "does-not-fit",
        inline(zero_stage=0) | EIGHT_IN_BF16,
        inline(zero_stage=3) | EIGHT_IN_BF16,
        context={"model": "llama-3.1-8b", "gpus": "8xH100"},
    ),
    LintCase(
        "does-not-fit",
        LOCAL | {"distributed_type": "MULTI_GPU"} | EIGHT_IN_BF16,
        LOCAL | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}} | EIGHT_IN_BF16,
        context={"model": "llama-3.1-8b", "gpus": "8xH100"},
    ),
    # Judged by accelerate itself in test_lint_parallelism.py.
    LintCase(
        "parallelism",
        LOCAL | FSDP2 | {"parallelism_config": {"parallelism_config_tp_size": 2}},
        LOCAL | FSDP2 | {"parallelism_config": {"parallelism_config_dp_shard_size": 2}},
    ),
    LintCase(
        "parallelism",
        LOCAL | {"parallelism_config": {"parallelism_config_cp_size": 2}},
        LOCAL | {"parallelism_config": {"parallelism_config_sp_size": 2}},
        "warning",
    ),
    LintCase(
        "main-process-ip", LOCAL | {"num_machines": 2}, LOCAL | {"num_machines": 2, "main_process_ip": "n0"}, "warning"
    ),
    LintCase(
        "main-process-ip",
        LOCAL | {"num_machines": 2, "main_process_ip": "127.0.0.1"},
        LOCAL | {"num_machines": 2, "main_process_ip": "10.0.0.1"},
    ),
    LintCase("processes-per-machine", LOCAL | {"num_machines": 4, "main_process_ip": "n0"}, LOCAL),
    LintCase("decided-by-file", LOCAL | FILE | {"mixed_precision": "bf16"}, LOCAL | FILE),
    LintCase(
        "config-file-missing",
        LOCAL | {"deepspeed_config": {"deepspeed_config_file": "no.json"}},
        LOCAL | FILE,
        "warning",
    ),
    LintCase("batch-arithmetic", LOCAL | {"num_processes": 3} | FILE, LOCAL | FILE),
    LintCase(
        "nvme-path",
        inline(zero_stage=3, offload_param_device="nvme", zero3_save_16bit_model=True),
        inline(zero_stage=3, offload_param_device="cpu", zero3_save_16bit_model=True),
    ),
    LintCase("offload-stage", inline(zero_stage=2, offload_param_device="cpu"), inline(zero_stage=2)),
    LintCase("gather-on-save", inline(zero_stage=3), inline(zero_stage=3, zero3_save_16bit_model=True), "warning"),
    LintCase("other-stage-key", inline(zero_stage=2, zero3_init_flag=True), inline(zero_stage=2), "warning"),
    LintCase(
        "wrap-policy", fsdp(fsdp_auto_wrap_policy="NO_WRAP"), fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP"), "warning"
    ),
    LintCase("wrap-policy", fsdp(), fsdp(fsdp_auto_wrap_policy="transformer_based_wrap"), "warning"),
    LintCase(
        "wrap-policy",
        fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=0),
        fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1),
        "warning",
    ),
    LintCase("wrap-policy", fsdp(), fsdp(fsdp_version=1, fsdp_sharding_strategy="NO_SHARD"), "warning"),
    LintCase("wrap-policy", fsdp(fsdp_auto_wrap_policy=1), fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP")),
    # 16 bytes a parameter over 8 ranks, and on each 2 of gathered weights and 2 of gradients, are 45 GiB of 37 usable;
    # a layer at a time, 22.
    LintCase(
        "does-not-fit",
        fsdp(fsdp_auto_wrap_policy="NO_WRAP", fsdp_activation_checkpointing=True) | EIGHT_IN_BF16,
        fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_activation_checkpointing=True) | EIGHT_IN_BF16,
        context={"model": "llama-3.1-8b", "gpus": "8xA100-40"},
    ),
    LintCase(
        "fsdp2-key",
        LOCAL | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_forward_prefetch": True}},
        LOCAL | FSDP2,
    ),
    LintCase(
        "fsdp2-key",
        LOCAL | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}},
        LOCAL | FSDP2,
        "warning",
    ),
)


SPLIT = (
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP "
    "--use_parallelism_config --parallelism_config_tp_size=2 "
    "--parallelism-config-dp-shard-size 2"
)
OF_FOUR = "deepspeed t.py --deepspeed ds.json --per_device_train_batch_size 4"
TWO = "--nnodes 2 --nproc-per-node 8"
MEGATRON = "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 2"
AT, MEET = "--master_addr node-a --master_port 29500", "--rdzv_endpoint node-a:29500"
BATCH, EIGHT_TASKS = "#SBATCH --nodes=2\n#SBATCH --gres=gpu:h100:8\n", "#SBATCH --ntasks-per-node=8\n"
EACH_EIGHT, EACH_N = f"srun torchrun {TWO} {MEET} t.py", f"srun torchrun --nnodes=2 --nproc_per_node=$N {MEET} t.py"
COMMAND_CASES = (
    LintCase("unknown-option", "deepspeed --n_gpus 8 train.py", "deepspeed --num_gpus 8 train.py --n_gpus 8"),
    LintCase("unknown-option", "deepspeed --num 8 train.py", "deepspeed --num_gpu 8 train.py"),  # argparse takes it
    LintCase("unknown-option", "torchrun --nproc_per_gpu=8 train.py", "torchrun --nproc_per_node=8 train.py"),
    LintCase(
        "unknown-option",
        "accelerate launch --num_process 8 \\\n  train.py",
        "accelerate launch --num_processes 8 \\\n  train.py --num_process 8",
    ),
    LintCase(
        "former-launcher",
        "python -m torch.distributed.launch --nproc_per_node=8 train.py",
        "python3.11 -m torch.distributed.run --nproc_per_node=8 train.py",
        "warning",
    ),
    LintCase("former-launcher", "python -u -m torch.distributed.launch t.py", "torchrun t.py", "warning"),
    LintCase("one-process", "torchrun train.py", "torchrun $OPTIONS train.py", "warning"),
    LintCase("one-process", "torchrun train.py", "torchrun --nproc_per 8 train.py", "warning"),
    LintCase(
        "one-process",
        "python -m kit.training.interruptible -m torch.distributed.run t.py",
        "python -m kit.training.interruptible -m torch.distributed.run --nproc_per_node 2 t.py",
        "warning",
    ),
    LintCase("one-process", "# as before: \\\ntorchrun train.py", "# as before:\n# torchrun train.py", "warning"),
    LintCase("one-process", "python -u t.py --deepspeed ds.json", "python -u t.py", "warning"),
    LintCase("one-process", "python train.py --deepspeed ds.json", "deepspeed train.py --deepspeed ds.json", "warning"),
    LintCase(
        "one-process", "python t.py --deepspeed ds.json", "srun --ntasks=8 python t.py --deepspeed ds.json", "warning"
    ),
    LintCase("one-process", "torchrun t.py", "#SBATCH --ntasks-per-node=8\ntorchrun t.py", "warning"),
    LintCase("one-process", "#SBATCH --ntasks-per-node=1\ntorchrun t.py", "mpirun -n 8 torchrun t.py", "warning"),
    LintCase(
        "fsdp-and-deepspeed", "deepspeed t.py --fsdp full_shard --deepspeed ds.json", "deepspeed t.py --fsdp full_shard"
    ),
    LintCase(
        "fsdp-and-deepspeed", "accelerate launch --use_fsdp --use-deepspeed t.py", "accelerate launch --use_fsdp t.py"
    ),
    LintCase(
        "visible-devices",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 t.py",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 t.py",
    ),
    LintCase(
        "visible-devices",
        "export CUDA_VISIBLE_DEVICES=0,1,2\naccelerate launch --num_processes 4 t.py",
        "export CUDA_VISIBLE_DEVICES=0,1,2\naccelerate launch --num_machines 2 --main_process_ip n --num_processes 6 t",
    ),
    LintCase(
        "unknown-option", "accelerate launch --num_processes $((N * 8)) --num_process 2 t.py", "accelerate launch t.py"
    ),
    LintCase(
        "machine-rank", f"torchrun {TWO} --master-addr n0 --node-rank 2 t.py", f"torchrun {TWO} --node-rank 1 t.py"
    ),
    LintCase("main-process-ip", f"torchrun {TWO} train.py", f"torchrun {TWO} --rdzv-endpoint n0:29500 train.py"),
    LintCase(
        "main-process-ip",
        "accelerate launch --num_machines 2 train.py",
        "accelerate launch --num_machines 2 --main_process_ip n0 train.py",
    ),
    LintCase("main-process-ip", f"torchrun {TWO} train.py", f"torchrun {TWO} $MORE train.py"),
    LintCase("parallelism", f"{SPLIT} --num_processes 2 t.py", f"{SPLIT} --num_processes 4 t.py"),
    LintCase("parallelism", f"{SPLIT} --num_processes 2 t.py", f"{SPLIT} --num_processes $N t.py"),
    LintCase(
        "wrap-policy",
        "accelerate launch --use_fsdp --num_processes 8 t.py",
        "accelerate launch --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --num_processes 8 t.py",
        "warning",
    ),
    LintCase("not-read", "swift sft --model a", "torchrun --nproc_per_node 8 swift.py", "warning"),
    LintCase("not-read", "python -m pip install x", 'exec "$PYTHON" -m kit.training . "$@"', "warning"),
    LintCase("not-read", "echo torchrun", "python swift.py", "warning"),
    LintCase("not-read", "python t.py\nWORLD=2 trl sft --model a", "python t.py\necho trl sft", "note"),
    LintCase("node-rank", f"torchrun {TWO} {AT} train.py", f"torchrun {TWO} {AT} --node_rank $RANK train.py"),
    LintCase("node-rank", f"torchrun {TWO} {AT} t.py --model $M", f"torchrun {TWO} $MORE {AT} t.py --model $M"),
    LintCase("node-rank", f"torchrun {TWO} {MEET} t.py", f"torchrun {TWO} {MEET} --rdzv_backend c10d t.py"),
    LintCase("node-rank", f"torchrun {TWO} {AT} t.py", f"export PET_NODE_RANK=$R\ntorchrun {TWO} {AT} t.py"),
    LintCase(
        "node-rank",
        "accelerate launch --num_machines 2 --main_process_ip n0 t.py",
        "accelerate launch --num_machines 2 --main_process_ip n0 --machine_rank 0 t.py",
    ),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank 0 t.py", f"torchrun {TWO} {AT} --node_rank 0 t.py"),
    LintCase(
        "node-rank",
        f"srun torchrun {TWO} {AT} --node_rank $SLURM_NODEID t.py",
        f"srun bash -c 'torchrun {TWO} {AT} --node_rank $SLURM_NODEID t.py'",
    ),
    LintCase(
        "main-process-ip", f"torchrun {TWO} --master_addr localhost --node_rank 0 t.py", f"torchrun {TWO} {AT} t.py"
    ),
    LintCase("main-process-ip", f"torchrun {TWO} --rdzv_endpoint 127.0.0.1:29500 t.py", f"torchrun {TWO} {MEET} t.py"),
    LintCase(
        "main-process-ip",
        f"torchrun {TWO} {AT} --rdzv_backend c10d t.py",
        f"torchrun {TWO} {MEET} --rdzv_backend c10d t.py",
    ),
    LintCase(
        "main-process-ip",
        "H=localhost\nN=2\naccelerate launch --num_machines $N --main_process_ip $H --machine_rank 0 t.py",
        "H=localhost\nN=1\naccelerate launch --num_machines $N --main_process_ip $H --machine_rank 0 t.py",
    ),
    LintCase("tasks-and-processes", f"{BATCH}{EIGHT_TASKS}{EACH_EIGHT}", f"{BATCH}{EIGHT_TASKS}srun python t.py"),
    LintCase("tasks-and-processes", f"{BATCH}{EIGHT_TASKS}{EACH_EIGHT}", f"{BATCH}{EACH_EIGHT}"),
    LintCase("tasks-and-processes", f"{BATCH}N=16\n{EACH_N}", f"{BATCH}N=8\n{EACH_N}"),
    LintCase("tasks-and-processes", f"{EIGHT_TASKS}{EACH_EIGHT}", f"#SBATCH -n 1\n{EACH_EIGHT}", "warning"),
    LintCase("one-node", f"{BATCH}torchrun {TWO} {MEET} t.py", f"{BATCH}srun torchrun {TWO} {MEET} t.py"),
    LintCase("one-node", f"{BATCH}torchrun {TWO} {MEET} t.py", f"#SBATCH --nodes=1\ntorchrun {TWO} {MEET} t.py"),
    LintCase(
        "one-node", f"{BATCH}srun torchrun --nproc_per_node 8 t.py", f"{BATCH}srun torchrun {TWO} t.py", "warning"
    ),
    LintCase(
        "one-node",
        "for h in $(cat hostfile); do ssh $h torchrun --nproc_per_node 8 t.py; done",
        "torchrun --nproc_per_node 8 t.py",
        "warning",
    ),
    # Judged by megatron.core in test_lint_megatron.py.
    LintCase("megatron-argument", f"{MEGATRON} --global-batch-size 15", f"{MEGATRON} --global-batch-size 16"),
    LintCase(
        "broken-line",
        "torchrun --nproc_per_node 8 \\ \n  --nnodes 1 t.py",
        "torchrun --nproc_per_node 8 \\\n  --nnodes 1 t.py",
    ),
    LintCase("broken-line", "python t.py\n\n  --seed 1", "python t.py\nARGS=(\n  --seed 1\n)"),
    LintCase("given-twice", "python t.py --seed 1 --seed=2", "python t.py --seed 1 --seed=1", "warning"),
    LintCase("given-twice", "python t.py --path a --path b", "python t.py --path a", "note"),
    LintCase(
        "given-twice",
        "torchrun --nproc-per-node 8 --nproc_per_node 4 t.py",
        "torchrun --nproc_per_node 8 t.py --nproc_per_node 4",
        "warning",
    ),
    LintCase("all-arguments", "torchrun --nproc_per_node $@ t.py", "torchrun --nproc_per_node 8 t.py $@", "warning"),
    LintCase("all-arguments", 'deepspeed "$@" t.py --seed 1', 'deepspeed t.py --seed 1 "$@"', "warning"),
    LintCase("all-arguments", "python t.py --seed $@", "python t.py --bf16 $@", "warning"),
    LintCase(
        "unset-variable",
        "GPUS=8\ntorchrun --nproc_per_node $GPU t.py",
        "GPU=8\ntorchrun --nproc_per_node $GPU t.py",
        "warning",
    ),
    LintCase(
        "unset-variable", "torchrun --nproc_per_node $N t.py", "read N\ntorchrun --nproc_per_node $N t.py", "note"
    ),
    LintCase(
        "unset-variable",
        "accelerate launch --num_processes $((SLURM_NNODES * EACH)) t.py",
        "EACH=${EACH:-8}\naccelerate launch --num_processes $((SLURM_NNODES * EACH)) t.py",
        "note",
    ),
    LintCase(
        "unset-variable", "torchrun --nproc_per_node $N t.py", ". ./site.sh\ntorchrun --nproc_per_node $N t.py", "note"
    ),
    LintCase("hostfile", "deepspeed --num_nodes 2 t.py", "deepspeed -H hosts --num_nodes 2 t.py", "warning"),
    LintCase("chosen-twice", "deepspeed --include n0:0,1 --num_gpus 2 t.py", "deepspeed --include n0:0,1 t.py"),
    LintCase(
        "config-file-missing", "deepspeed t.py --deepspeed no.json", "deepspeed t.py --deepspeed ds.json", "warning"
    ),
    # Judged by the Trainer itself in test_lint_trainer.py.
    LintCase("trainer-mismatch", OF_FOUR, f"{OF_FOUR} --bf16"),
    LintCase("trainer-mismatch", f"{OF_FOUR} --bf16 false", f"{OF_FOUR} --bf16_full_eval"),
    LintCase("trainer-mismatch", "deepspeed t.py --deepspeed ds.json --bf16", f"{OF_FOUR} --bf16 True"),
    LintCase(
        "dropped-argument",
        "torchrun --nproc_per_node 8 train.py --evaluation_strategy no",
        "torchrun --nproc_per_node 8 train.py --eval_strategy no",
    ),
    LintCase(
        "batch-arithmetic",
        "deepspeed --num_gpus 3 t.py --deepspeed ds.json",
        "deepspeed --num_gpus 2 t.py --deepspeed ds.json",
    ),
)
"""Launch lines; beside them lies ``ds.json``, for two GPUs in bf16."""

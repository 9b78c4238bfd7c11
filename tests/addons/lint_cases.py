"""For every rule of lint a configuration that it must speak of, and a neighbour that it must not: DeepSpeed's files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


@dataclass(frozen=True)
class LintCase:
    """``bad`` raises the rule, ``good`` does not; text where JSON itself is the matter. They differ in nothing else."""

    rule: str
    bad: dict[str, Any] | str
    good: dict[str, Any] | str = field(default_factory=lambda: BASE)
    severity: str = "error"
    context: dict[str, str] = field(default_factory=dict)
    """model, gpus, reader."""
    good_context: dict[str, str] | None = None
    refused: bool = False
    """DeepSpeed's own parser raises for it."""
    says: tuple[str, ...] = ()
    """Words of the finding."""


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    """A configuration of one stage."""
    gather = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return BASE | {"zero_optimization": {"stage": stage, **gather, **keys}}


def batch(total: Any, micro: Any, steps: Any = None, **more: Any) -> dict[str, Any]:
    """Batch sizes alone."""
    given = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return {key: value for key, value in given.items() if value is not None} | more


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


STAGE_2, STAGE_3 = zero(2), zero(3)
SHORT_STATE = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/tmp"}
AIO = {"aio": {"block_size": 1048576, "queue_depth": 32}}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
FP16, ON = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
OFFLOADED = STAGE_3["zero_optimization"] | {"offload_optimizer": CPU | {"pin_memory": True}}
EIGHT, LARGE = {"model": "llama-3.1-8b", "gpus": "8xH100"}, {"model": "llama-3-70b", "gpus": "8xA100-40"}
ON_8, ON_16, ON_V100 = {"gpus": "8xH100"}, {"gpus": "16xH100"}, {"gpus": "8xV100-32"}
READ_BY_DEEPSPEED, READ_BY_TRAINER = {"reader": "deepspeed"}, {"reader": "trainer"}
BF16, ADDED_UP = BASE | ADAMW | ON | {"gradient_accumulation_steps": 8}, STAGE_2 | ON
SPLIT_BY_4 = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
GATHER = "stage3_gather_16bit_weights_on_model_save"
DEEPSPEED_CASES = (
    LintCase("json-syntax", '{"train_batch_size": 8 // eight\n}', '{"train_batch_size": 8}', "warning"),
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
    # What a configuration costs where a model and GPUs are given.
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
        zero(3, offload_param=NVME | {"buffer_size": 1e6}) | AIO | ON,
        zero(3, offload_param=NVME | {"buffer_size": 1e8}) | AIO | ON,
        "error",
        EIGHT,
        # 128,256 · 4,096 / 8.
        says=("offload_param.buffer_size: a buffer of 1,000,000 elements; ", "llama-3.1-8b has 65,667,072;"),
    ),
    LintCase("prediction", STAGE_2 | BF16, STAGE_2 | BF16, "note", EIGHT, {"model": "llama-3.1-8b"}),
    # What a rule says where it computes something, and its other conditions.
    LintCase("batch-arithmetic", batch(30, 4, 2), batch(32, 4, 2),
             says=("30 is not a multiple of micro batch 4 · accumulation 2: no number of GPUs", "use 24 or 32, or")),
    LintCase("batch-arithmetic", batch(30, 4, 2), batch(30, 4, "auto")),
    LintCase("batch-arithmetic", batch(4, 8), batch(16, 8),
             says=("4 is not a multiple of micro batch 8 · accumulation 1: no", "use 8, or leave")),
    LintCase("batch-arithmetic", batch(64, 4, 4), batch(64, 4, 2), context=ON_8,
             says=("64 is not micro batch 4 · accumulation 4 · 8 data-parallel ranks = 128, and",
                   "use gradient_accumulation_steps=2, or")),
    LintCase("batch-arithmetic", batch(64, 4, 1), batch(32, 4, 1), context=ON_8,
             says=("64 is not micro batch 4 · accumulation 1 · 8 data-parallel ranks = 32, and",
                   "use gradient_accumulation_steps=2, or")),
    LintCase("batch-arithmetic", batch(40, 4), batch(64, 4), context=ON_8,
             says=("40 is not micro batch 4 · accumulation 1 · 8 data-parallel ranks = 32, and",
                   "use a train_batch_size of 32 or 64, or")),
    LintCase("batch-arithmetic", batch(8, 4), batch(32, 4), context=ON_8, says=("use a train_batch_size of 32, or",)),
    LintCase("batch-arithmetic", batch(16, 4, 2, **SPLIT_BY_4), batch(32, 4, 2, **SPLIT_BY_4), context=ON_16,
             says=("4 data-parallel ranks = 32, and", "use gradient_accumulation_steps=1, or")),
    LintCase("batch-arithmetic", batch(64, 4, 2), batch(64, 4, 2), context=ON_16, good_context=ON_8),
    LintCase("batch-arithmetic", batch(0, 4), batch(4, 4), says=("train_batch_size: 0.0 is not a batch size",)),
    LintCase("batch-arithmetic", batch(8, 0.5), batch(8, 1), says=("per_gpu: 0.5 is not a batch size",)),
    LintCase("batch-arithmetic", batch(8, 4, 0), batch(8, 4, 1), says=("steps: 0.0 is not a batch size",)),
    LintCase("batch-missing", {"gradient_accumulation_steps": 2}, {"train_micro_batch_size_per_gpu": 8}),
    LintCase("two-precisions", BASE | FP16 | ON, BASE | FP16 | {"bf16": {"enabled": False}}, says=("keep bf16",)),
    LintCase("two-precisions", BASE | FP16 | ON, BASE | ON, context=ON_V100, says=("keep fp16",)),
    LintCase("two-precisions", BASE | FP16 | ON, BASE | ON, context=ON_8, says=("keep bf16",)),
    LintCase("bf16-hardware", BASE | ON, BASE | ON, context=ON_V100, good_context={"gpus": "2xcpu"},
             says=("V100-32 has no bf16 units",)),
    LintCase("bf16-hardware", BASE | ON, BASE | {"bf16": {"enabled": "auto"}}, context=ON_V100),
    LintCase("static-loss-scale", BASE | {"fp16": {"enabled": True, "loss_scale": 1024}},
             BASE | {"fp16": {"enabled": False, "loss_scale": 1024}}, "warning", says=("a fixed scale of 1024: ",)),
    LintCase("bf16-accumulation", ADDED_UP | {"gradient_accumulation_steps": 8},
             ADDED_UP | {"gradient_accumulation_steps": 7}, "warning", says=("gradients of 8 micro batches are",)),
    LintCase("bf16-accumulation", ADDED_UP | {"gradient_accumulation_steps": 8},
             BASE | ON | {"gradient_accumulation_steps": 8}, "warning"),
    LintCase("bf16-accumulation", ADDED_UP | {"gradient_accumulation_steps": 8},
             STAGE_2 | {"gradient_accumulation_steps": 8}, "warning"),
    LintCase("bf16-state", STAGE_2 | SHORT_STATE, STAGE_2 | ON, "warning", says=("6 with bf16_optimizer_states",)),
    LintCase("bf16-state", STAGE_2 | {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, STAGE_2 | ON,
             says=("with bf16_master_weights_and_grads alone",)),
    LintCase("bf16-state", BASE | SHORT_STATE, BASE | ON, says=("at stages 1, 2 and 3 alone",)),
    LintCase("removed-optimizer", BASE | optimizer("1Bit-Adam"), BASE | optimizer("Lamb"),
             says=("optimizer.type: 1Bit-Adam is gone from DeepSpeed",)),
    LintCase("removed-optimizer", BASE | optimizer("ZeroOne_Adam"), BASE | optimizer("Adam")),
    LintCase("gpu-optimizer-offloaded", zero(3, offload_optimizer=NVME) | optimizer("Lamb"),
             zero(3) | optimizer("Lamb"), says=("Lamb steps on a GPU only, and its state is offloaded to nvme",)),
    LintCase("untested-optimizer", zero(1) | optimizer("SGD"),
             zero(1) | optimizer("SGD") | {"zero_allow_untested_optimizer": True}, says=("ZeRO refuses SGD, which",)),
    LintCase("untested-optimizer", zero(1) | optimizer("SGD"), zero(1) | optimizer("OneBitAdam")),
    LintCase("untested-optimizer", zero(1) | optimizer("Lamb"), zero(1) | optimizer("Muon")),
    LintCase("untested-optimizer", zero(1) | optimizer("Lamb"), zero(1)),
    LintCase("adam-is-adamw", BASE | optimizer("Adam", weight_decay=0.1), BASE | optimizer("Adam", weight_decay=0),
             "note"),
    LintCase("adam-is-adamw", BASE | optimizer("Adam", weight_decay=0.1),
             BASE | optimizer("Adam", weight_decay=0.1, adam_w_mode=False), "note"),
    LintCase("clipping-in-optimizer", BASE | optimizer("AdamW", max_grad_norm=0.5), BASE | {"gradient_clipping": 0.5},
             says=("write gradient_clipping: 0.5",)),
    LintCase("client-optimizer-offloaded", zero(2, offload_optimizer=CPU),
             zero(2, offload_optimizer=CPU) | {"zero_force_ds_cpu_optimizer": False}, "note", READ_BY_DEEPSPEED),
    LintCase("client-optimizer-offloaded", zero(2, offload_optimizer=CPU), zero(2, offload_optimizer=CPU) | ADAMW,
             "note", READ_BY_DEEPSPEED),
    LintCase("client-optimizer-offloaded", zero(2, offload_optimizer=CPU),
             zero(2, offload_optimizer={"device": "none"}), "note", READ_BY_DEEPSPEED),
    LintCase("scheduler-name", BASE | {"scheduler": {"type": "onecycle"}}, BASE | {"scheduler": {"type": "StepLR"}},
             says=("onecycle is no scheduler; write OneCycle",)),
    LintCase("zero-stage", zero(-1), zero(0), says=("zero_optimization.stage: -1 is no stage",)),
    LintCase("zero-stage", zero(1.5), zero("auto")),  # type: ignore[arg-type]
    LintCase("other-stage-key", zero(1, stage3_max_reuse_distance=1), zero(3, stage3_max_reuse_distance=1), "warning",
             says=("read by stage 3 only; at stage 1 it has no effect",)),
    LintCase("other-stage-key", zero(3, allgather_partitions=True), zero(2, allgather_partitions=True), "warning",
             says=("read by stages 1 and 2 only; at stage 3 it has no effect",)),
    LintCase("other-stage-key", zero(2, zero_hpz_partition_size=2), zero(2, zero_hpz_partition_size=1), "warning"),
    LintCase("other-stage-key", zero(0, sub_group_size=1e9), zero(2, sub_group_size=1e9), "warning"),
    LintCase("other-stage-key", zero(0, sub_group_size=1e9), zero(1, sub_group_size=1e9), "warning"),
    LintCase("other-stage-key", zero(2, stage3_max_reuse_distance=1),
             zero("auto", stage3_max_reuse_distance=1), "warning"),  # type: ignore[arg-type]
    LintCase("offload-stage", zero(1, offload_param=NVME), zero(1, offload_param={"device": "none"}),
             says=("so that at stage 1 they stay",)),
    LintCase("offload-stage", BASE | {"zero_optimization": {"offload_param": CPU}}, zero(3, offload_param=CPU),
             says=("so that at stage 0 they stay",)),
    LintCase("offload-stage", zero(1, offload_optimizer=NVME) | AIO, zero(1, offload_optimizer=CPU) | AIO,
             says=("offload_optimizer.device: at stage 1 DeepSpeed takes nvme for cpu",)),
    LintCase("offload-stage", zero(0, offload_optimizer=NVME) | AIO, zero(3, offload_optimizer=NVME) | AIO,
             says=("only the ZeRO optimizers offload",)),
    LintCase("nvme-path", zero(3, offload_optimizer={"device": "nvme"}), zero(3, offload_optimizer=NVME)),
    LintCase("nvme-path", zero(3, offload_optimizer=NVME | {"nvme_path": ""}), zero(3, offload_optimizer=CPU)),
    LintCase("nvme-path", zero(3, offload_optimizer=NVME | {"nvme_path": "/no/such/disk"}),
             zero(3, offload_optimizer=NVME), "note", says=("nvme_path: /no/such/disk is not a directory",)),
    LintCase("nvme-aio", zero(3, offload_optimizer=NVME), zero(3, offload_optimizer=CPU), "warning"),
    LintCase("gather-on-save", zero(3) | {"zero_optimization": {"stage": 3, GATHER: False}}, zero(3), "warning",
             says=(f"zero_optimization.{GATHER}: a model saved",)),
    LintCase("gather-on-save", BASE | {"zero_optimization": {"stage": 3}},
             BASE | {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}}, "warning"),
    LintCase("gather-on-save", BASE | {"zero_optimization": {"stage": 3}}, BASE | {"zero_optimization": {"stage": 2}},
             "warning"),
    LintCase("pipeline-zero", zero(2) | {"pipeline": {"stages": 4}}, BASE | {"pipeline": {"stages": 4}}, "note",
             says=("which refuses ZeRO stage 2",)),
    LintCase("pipeline-zero", zero(2) | {"pipeline": {"stages": 4}}, zero(2) | {"pipeline": {}}, "note"),
    LintCase("auto-unfilled", BASE | {"steps_per_print": "auto"}, BASE, says=("Trainer included; write",)),
    LintCase("auto-unfilled", zero(2, allgather_bucket_size="auto"), zero(2), "note",
             says=("Trainer included; DeepSpeed's default stands; write",)),
    LintCase("auto-outside-trainer", batch("auto", "auto"), batch("auto", "auto"), "note", {}, READ_BY_TRAINER,
             says=("train_batch_size: 2 values are",)),
    LintCase("auto-outside-trainer", batch("auto", 4), batch("auto", 4), context=READ_BY_DEEPSPEED,
             good_context=READ_BY_TRAINER, says=("deepspeed.initialize does not; write",)),
    LintCase("auto-outside-trainer", zero("auto"), zero(2), "warning", READ_BY_DEEPSPEED,  # type: ignore[arg-type]
             says=("takes its own default; write",)),
    LintCase("auto-outside-trainer", BASE | {"gradient_clipping": "auto"}, BASE | {"steps_per_print": "auto"}, "note"),
    # 6e8 elements of 4 bytes are 2.24 GiB.
    LintCase("bucket-memory", zero(2, reduce_bucket_size=6e8, overlap_comm=True), zero(2, reduce_bucket_size=6e8),
             "warning", says=("2 bucket(s) of 6e+08 elements take 4.5 GiB; links",)),
    LintCase("bucket-memory", zero(1, reduce_bucket_size=1.2e9), zero(1, reduce_bucket_size=1.2e9) | ON, "warning",
             says=("1 bucket(s) of 1e+09 elements take 4.5 GiB; links",)),
    LintCase("bucket-memory", zero(1, reduce_bucket_size=1.2e9), zero(0, reduce_bucket_size=1.2e9), "warning"),
    # gpt2 has 124 million; an eighth are 15.5.
    LintCase("bucket-memory", zero(2), zero(3), "warning", {"model": "gpt2"},
             says=("zero_optimization.stage: 1 bucket(s) of 5e+08 elements take 1.9 GiB, more than all gradients of "
                   "gpt2 together; use at most 2e+07",)),
    LintCase("bucket-memory", zero(2, reduce_bucket_size=2e8), zero(2, reduce_bucket_size="auto"), "warning",
             {"model": "gpt2"},
             says=("zero_optimization.reduce_bucket_size: 1 bucket(s) of 2e+08 elements take 0.7 GiB",)),
    LintCase("json-syntax", '{"train_batch_size": 8,\n}', '{"train_batch_size": 8\n}', "warning",
             says=("config.json:1: ", "a trailing comma is no JSON")),
    LintCase("json-syntax", '{\n"train_batch_size": /* a\n b */ 8 # c\n}', '{"train_batch_size": 8}', "note",
             READ_BY_DEEPSPEED, says=("config.json:2: ", "a comment is no JSON")),
    LintCase("duplicate-key", '{"train_batch_size": 8,\n"bf16": {"enabled": true, "enabled": false}}',
             '{"train_batch_size": 8,\n"bf16": {"enabled": true}, "fp16": {"enabled": false}}',
             says=("config.json:2: ", "enabled: is there twice")),
    LintCase("unknown-key", BASE | {"offload_optimizer": CPU}, zero(2, offload_optimizer=CPU),
             says=("nothing reads it here; move it into zero_optimization: zero_optimization.offload_optimizer",)),
    LintCase("unknown-key", BASE | {"max_grad_norm": 1.0}, BASE | {"gradient_clipping": 1.0},
             says=("max_grad_norm: no key of DeepSpeed ", ": ignored at the top level", "did you mean "
                   "gradient_clipping?")),
    LintCase("unknown-key", BASE | {"nonsense": 1}, BASE | {"_nonsense": 1}, "warning", says=("; remove it",)),
    LintCase("unknown-key", zero(2, nonsense=1), zero(2), says=("; remove it",)),  # refused there
    LintCase("unknown-key", BASE | {"aio": {"nonsense": 1}}, BASE | {"aio": {}}, "warning"),
    LintCase("removed-key", BASE | {"curriculum_learning": {}}, BASE | {"data_efficiency": {}},
             says=("use data_efficiency.data_sampling.curriculum_learning",)),
    LintCase("removed-key", BASE | {"eigenvalue": {}}, BASE, says=("refuses to start with it; remove it",)),
    LintCase("deprecated-key", zero(3, cpu_offload_param=True), zero(3, offload_param=CPU), "warning",
             says=("zero_optimization.cpu_offload_param: deprecated; use offload_param",)),
    LintCase("deprecated-key", zero(3, stage3_gather_fp16_weights_on_model_save=True), zero(3), "warning",
             says=("deprecated; use gather_16bit_weights_on_model_save",)),
    LintCase("deprecated-key", BASE | {"zero_optimization": True}, zero(1), "warning",
             says=('zero_optimization: a switch instead of a section', 'write {"stage": 1}')),
    LintCase("deprecated-key", BASE | {"zero_optimization": False}, zero(0), "warning",
             says=('write {"stage": 0}',)),
    LintCase("text-value", BASE | {"gradient_clipping": "1.5"}, BASE | {"gradient_clipping": 1.5},
             says=("gradient_clipping: ", '"1.5" is text, which does not equal', "; write 1.5")),
    LintCase("text-value", batch("8", 4), batch(8, 4), says=('"8" is text, which', "; write 8")),
    LintCase("text-value", BASE | {"fp16": {"enabled": "False"}}, BASE | {"fp16": {"enabled": "auto"}},
             says=('fp16.enabled: "False" is text; every text is true', "write false")),
    LintCase("value-range", zero(2, reduce_bucket_size=0), zero(2, reduce_bucket_size="auto"),
             says=("0 is out of range: it must be > 0; write a number > 0",)),
    LintCase("value-range", zero(2, offload_optimizer=CPU | {"ratio": 1.5}),
             zero(2, offload_optimizer=CPU | {"ratio": 1.0}), says=("1.5 is out of range: it must be <= 1 and >= 0",)),
    LintCase("value-range", zero(2, offload_optimizer=CPU | {"ratio": -0.5}),
             zero(2, offload_optimizer=CPU | {"ratio": 0}), says=("-0.5 is out of range",)),
    LintCase("value-range", BASE | {"fp16": {"initial_scale_power": 128}},
             BASE | {"fp16": {"initial_scale_power": 127}}, says=("128 is out of range: it must be >= 0 and <= 127",)),
    # 16 · 70.6e9 / 8 bytes of states alone are 131 GiB.
    LintCase("does-not-fit", STAGE_3 | ON, STAGE_3 | ON, context=LARGE,
             good_context={"model": "llama-3.2-1b", "gpus": "8xA100-40"},
             says=("llama-3-70b at 4096 tokens, micro batch 1 peaks at about ", " GiB without gradient checkpointing; "
                   "A100-40 has 37 usable", "use a higher stage, offload or more GPUs (kit plan llama-3-70b")),
    LintCase("host-ram", zero(3, offload_optimizer=CPU | {"pin_memory": True}) | ADAMW | ON, zero(3) | ADAMW | ON,
             context=LARGE, says=("zero_optimization.offload_optimizer: needs ",
             ", pinned and never swapped out, and ")),
    LintCase("host-ram", zero(3, offload_param=CPU, offload_optimizer=CPU) | ADAMW | ON,
             zero(3, offload_param=CPU) | ADAMW | ON, context=LARGE, says=(" GiB of host memory a node, and ",)),
    LintCase("prediction", STAGE_2 | ON, STAGE_2 | ON, "note", EIGHT, {"gpus": "8xH100"},
             says=("llama-3.1-8b at 4096 tokens, micro batch 1 on 8 H100: about ",)),
    LintCase("stage-for-nothing", STAGE_3 | BF16, STAGE_3 | BF16, "warning",
             {"model": "llama-3.2-1b", "gpus": "8xH100"}, {"model": "llama-3-70b", "gpus": "64xH100"},
             says=("zero_optimization.stage: llama-3.2-1b at 4096 tokens, micro batch 1 fits at stage 1, and",
                   " times as long; train at stage 1")),
    LintCase("stage-for-nothing", STAGE_3 | BF16, zero(2) | BF16, "warning", EIGHT, says=("; train at stage 2",)),
    LintCase("memory-not-judged", zero(2, offload_optimizer={"device": "tape"}) | ON,
             zero(2, offload_optimizer={"device": "none"}) | ON, "note", EIGHT, says=("offload to tape and none is",)),
    LintCase("memory-not-judged", STAGE_2 | ON | {"sequence_parallel_size": 2}, STAGE_2 | ON, "note", EIGHT,
             says=("no figures for a Hugging Face model whose tensors or sequences",)),
    LintCase("memory-not-judged", zero("auto") | ON, zero(2) | ON, "note", EIGHT,  # type: ignore[arg-type]
             says=("the number of ranks or the ZeRO stage is not a number here",)),
)  # fmt: skip

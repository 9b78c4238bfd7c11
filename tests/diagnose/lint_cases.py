"""For every rule of lint a configuration that it must speak of, and a neighbour that it must not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
STAGE_2: dict[str, Any] = BASE | {"zero_optimization": {"stage": 2}}
STAGE_3: dict[str, Any] = BASE | {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}


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


AIO = {"aio": {"block_size": 1048576, "queue_depth": 32}}
CPU = {"device": "cpu"}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}

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


def batch(total: Any, micro: Any, steps: Any = None, **more: Any) -> dict[str, Any]:
    """Batch sizes alone."""
    given = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return {key: value for key, value in given.items() if value is not None} | more


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


FP16, ON = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
ON_8, ON_16, ON_V100 = {"gpus": "8xH100"}, {"gpus": "16xH100"}, {"gpus": "8xV100-32"}
READ_BY_DEEPSPEED, READ_BY_TRAINER = {"reader": "deepspeed"}, {"reader": "trainer"}
SPLIT_BY_4 = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
ADDED_UP = STAGE_2 | ON
PATHLESS = {"device": "nvme"}
GATHER = "stage3_gather_16bit_weights_on_model_save"
TRAINING = "feature_extractor_type"
GPT2_MICRO = {"model": "gpt2"}
LARGE = {"model": "llama-3-70b", "gpus": "8xA100-40"}
# What a rule says where it computes something, and its other conditions.
DEEPSPEED_NUMBERS = (
    LintCase("batch-arithmetic", batch(30, 4, 2), batch(32, 4, 2),
             says=("30 is not a multiple of micro batch 4 · accumulation 2: no number of GPUs", "use 24 or 32, or")),
    LintCase("batch-arithmetic", batch(30, 4, 2), batch(30, 4, "auto")),
    LintCase("batch-arithmetic", batch(4, 8), batch(16, 8),
             says=("4 is not a multiple of micro batch 8 · accumulation 1: no", "use 8, or leave")),
    LintCase("batch-arithmetic", batch(64, 4, 4), batch(64, 4, 2), context=ON_8,
             says=("64 is not micro batch 4 · accumulation 4 · 8 data-parallel ranks = 128, and",
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
    LintCase("nvme-path", zero(3, offload_optimizer=PATHLESS), zero(3, offload_optimizer=NVME)),
    LintCase("nvme-path", zero(3, offload_optimizer=PATHLESS | {"nvme_path": ""}), zero(3, offload_optimizer=CPU)),
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
    LintCase("bucket-memory", zero(2), zero(3), "warning", GPT2_MICRO,
             says=("zero_optimization.stage: 1 bucket(s) of 5e+08 elements take 1.9 GiB, more than all gradients of "
                   "gpt2 together; use at most 2e+07",)),
    LintCase("bucket-memory", zero(2, reduce_bucket_size=2e8), zero(2, reduce_bucket_size="auto"), "warning",
             GPT2_MICRO, says=("zero_optimization.reduce_bucket_size: 1 bucket(s) of 2e+08 elements take 0.7 GiB",)),
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

TWO_MACHINES = {"num_machines": 2, "main_process_ip": "n0"}
MPI = {"mpirun_config": {"mpirun_ccl": "1"}}
AT_HOME = {"num_machines": 2, "main_process_ip": "127.0.0.1"}
JUDGED = {"model": "llama-3.1-8b", "gpus": "8xH100"}
ACCELERATE_NUMBERS = (
    LintCase("one-process", LOCAL | {"distributed_type": "NO"}, LOCAL | {"distributed_type": "NO", "num_processes": 1},
             says=("NO starts one process, not 2, and ends",)),
    LintCase("one-process", LOCAL | {"distributed_type": "MULTI_CPU"}, LOCAL | {"distributed_type": "MULTI_CPU"} | MPI),
    LintCase("machine-rank", LOCAL | TWO_MACHINES | {"machine_rank": 2}, LOCAL | TWO_MACHINES | {"machine_rank": 1},
             says=("rank 2 of 2 machines; ranks go from 0 to 1;",)),
    LintCase("main-process-ip", LOCAL | {"num_machines": 2}, LOCAL | {"num_machines": 1}, "warning",
             says=("2 machines and no main_process_ip",)),
    LintCase("main-process-ip", LOCAL | AT_HOME, LOCAL | AT_HOME | MPI,
             says=("2 machines that meet at 127.0.0.1: each",)),
    LintCase("main-process-ip", LOCAL | AT_HOME, LOCAL | AT_HOME | {"num_machines": 1}),
    LintCase("processes-per-machine", LOCAL | TWO_MACHINES | {"num_processes": 3}, LOCAL | TWO_MACHINES,
             says=("3 processes on 2 machines: ", "use a multiple of 2")),
    LintCase("decided-by-file", LOCAL | {"deepspeed_config": {**FILE["deepspeed_config"], "zero_stage": 2}},
             LOCAL | {"deepspeed_config": {"zero_stage": 2}}, says=("deepspeed_config.zero_stage: decided by",)),
    LintCase("decided-by-file", LOCAL | {"deepspeed_config": {**FILE["deepspeed_config"], "zero_stage": None}},
             LOCAL | {"deepspeed_config": {"zero_stage": None}}),
    LintCase("decided-by-file", LOCAL | FILE | {"mixed_precision": "bf16"}, LOCAL | FILE | {"mixed_precision": None}),
    LintCase("decided-by-file", LOCAL | FILE | {"mixed_precision": "bf16"},
             LOCAL | FILE | {"mixed_precision": "bf16", "distributed_type": "MULTI_GPU"}),
    LintCase("visible-devices", LOCAL | TWO_MACHINES | {"num_processes": 4, "gpu_ids": "3"},
             LOCAL | TWO_MACHINES | {"num_processes": 4, "gpu_ids": "0,3"},
             says=("1 visible, and 2 processes on a machine take one each; write num_processes: 1, or",)),
    LintCase("visible-devices", LOCAL | {"gpu_ids": "0"}, LOCAL | {"gpu_ids": "0", "use_cpu": True}),
    LintCase("visible-devices", LOCAL | {"gpu_ids": "0"}, {"distributed_type": "MULTI_GPU", "gpu_ids": "0"}),
    LintCase("unknown-key", fsdp(fsdp_verzion=2), fsdp(version=2), says=("did you mean fsdp_version?", "accelerate")),
    LintCase("wrap-class", fsdp(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer, GPT2Block"),
             fsdp(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer, Linear"), context={"model": "llama-3.1-8b"},
             says=(": GPT2Block is no class of llama-3.1-8b; write LlamaDecoderLayer",)),
    LintCase("wrap-class", fsdp(fsdp_transformer_layer_cls_to_wrap="GPT2Block"), fsdp(),
             context={"model": "llama-3.1-8b"}),
    LintCase("wrap-class", fsdp(fsdp_transformer_layer_cls_to_wrap="A"), fsdp(fsdp_transformer_layer_cls_to_wrap="A"),
             context={"model": "blenderbot-400m"}, good_context={},
             says=("write BlenderbotDecoderLayer, BlenderbotEncoderLayer",)),
    LintCase("offload-stage", inline(zero_stage=1, offload_param_device="nvme", offload_param_nvme_path="/tmp"),
             inline(zero_stage=1, offload_param_device="none"), says=("so that at stage 1 they stay on the GPU",)),
    LintCase("nvme-path", inline(zero_stage=3, offload_optimizer_device="nvme", zero3_save_16bit_model=True),
             inline(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/tmp"),
             says=("deepspeed_config.offload_optimizer_device: nvme", "add offload_optimizer_nvme_path")),
    LintCase("other-stage-key", inline(zero_stage=2, zero3_init_flag=True), inline(zero_stage=2, zero3_init_flag=False),
             "warning", says=("read at stage 3 only, and the stage is 2",)),
    LintCase("gather-on-save", inline(zero_stage=3), {**inline(zero_stage=3), "distributed_type": "MULTI_GPU"},
             "warning"),
    LintCase("does-not-fit", inline(zero_stage=0) | EIGHT_IN_BF16, inline() | EIGHT_IN_BF16, context=JUDGED,
             says=("deepspeed_config.zero_stage: llama-3.1-8b at 4096 tokens, micro batch 1 peaks",)),
    LintCase("offload-for-nothing", inline(zero_stage=2, offload_optimizer_device="cpu") | EIGHT_IN_BF16,
             inline(zero_stage=2, offload_optimizer_device="none") | EIGHT_IN_BF16, "warning",
             {"model": "llama-3.2-1b", "gpus": "8xH100"}, says=("deepspeed_config: llama-3.2-1b at 4096",)),
    LintCase("prediction", inline(zero_stage=2) | EIGHT_IN_BF16, inline(zero_stage=7) | EIGHT_IN_BF16, "note", JUDGED,
             says=("on 8 H100: about",)),
    LintCase("prediction", fsdp() | EIGHT_IN_BF16, fsdp() | {"distributed_type": "NO"}, "note", JUDGED,
             says=("on 8 H100: about",)),
    LintCase("memory-not-judged", fsdp(fsdp_offload_params=True), fsdp(fsdp_offload_params=False), "note", JUDGED,
             says=("no figures for FSDP with offload, or beside",)),
    LintCase("memory-not-judged", fsdp(fsdp_version=1, fsdp_sharding_strategy="HYBRID_SHARD"),
             fsdp(fsdp_version=1, fsdp_sharding_strategy="SHARD_GRAD_OP"), "note", JUDGED,
             says=("no figures for HYBRID_SHARD",)),
    LintCase("fsdp2-key", fsdp(fsdp_sync_module_states=True), fsdp(fsdp_version=1, fsdp_sync_module_states=True),
             "warning", says=("fsdp_config.fsdp_sync_module_states: of FSDP1; ", "; remove it")),
    LintCase("fsdp2-key", fsdp(fsdp_sharding_strategy="FULL_SHARD"), fsdp(fsdp_reshard_after_forward=True), "warning",
             says=("; use fsdp_reshard_after_forward",)),
    LintCase("fsdp2-key", fsdp(fsdp_backward_prefetch="NO"), fsdp(fsdp_version=1, fsdp_backward_prefetch="NO"),
             "warning"),
    LintCase("fsdp2-key", fsdp(fsdp_forward_prefetch=True), fsdp(fsdp_forward_prefetch=False)),
    LintCase("wrap-policy", fsdp(fsdp_auto_wrap_policy="ALL"), {**fsdp(fsdp_auto_wrap_policy="ALL"),
             "distributed_type": "MULTI_GPU"}, says=("ALL is no policy: accelerate",
             "write TRANSFORMER_BASED_WRAP, SIZE_"
             "BASED_WRAP or NO_WRAP")),
    LintCase("wrap-policy", fsdp(), fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP"), "warning",
             says=("fsdp_config.fsdp_auto_wrap_policy: NO_WRAP makes the model one group",)),
    LintCase("wrap-policy", fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=0),
             fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", fsdp_min_num_params=0), "warning",
             says=("SIZE_BASED_WRAP of 0 parameters makes",)),
    LintCase("config-file-missing", LOCAL | {"deepspeed_config": {"deepspeed_config_file": "no.json"}},
             LOCAL | {"deepspeed_config": {"deepspeed_config_file": "no.json"}, "distributed_type": "MULTI_GPU"},
             "warning", says=("no.json is neither here nor above",)),
)  # fmt: skip


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

WORLD_8 = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 2"
ON_TWO = f"torchrun {TWO} {MEET} --rdzv_backend c10d"
SPLIT_BY = "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 --use_parallelism_config"
ON_N = f"#SBATCH -N2 --gpus-per-node=8 --ntasks-per-node=2\nsrun torchrun --nnodes 2 {MEET}"
COMMAND_NUMBERS = (
    LintCase("unknown-option", "\ndeepspeed --n_gpus 8 t.py", "deepspeed --num_gpus 8 t.py",
             says=("config.sh:2: ", "--n_gpus: no option of deepspeed, which stops at it; did you mean --num_gpus?")),
    LintCase("unknown-option", "torchrun --standalone --zzz 1 t.py", "torchrun --standalone t.py --zzz 1",
             says=("--zzz: ", "; put it behind t.py, or remove it")),
    LintCase("visible-devices", "CUDA_VISIBLE_DEVICES=0,1, torchrun --nproc_per_node 4 t.py",
             "CUDA_VISIBLE_DEVICES=$G torchrun --nproc_per_node 4 t.py",
             says=("0,1, are visible, and 4 processes on a machine",)),
    LintCase("visible-devices", "accelerate launch --gpu_ids 0 --num_machines 2 --num_processes 4 t.py",
             "accelerate launch --gpu_ids 0,1 --num_machines 2 --num_processes 4 t.py",
             says=("0 are visible, and 2 processes on a machine",)),
    LintCase("machine-rank", f"torchrun {TWO} {AT} --node-rank 2 t.py",
             f"torchrun --nnodes 1:4 {AT} --node-rank 2 t.py",
             says=("rank 2 of 2 machines; ranks go from 0 to 1",)),
    LintCase("main-process-ip", f"torchrun {TWO} t.py", f"torchrun {TWO} $MORE", says=("2 nodes and no address",)),
    LintCase("main-process-ip", "accelerate launch --num_machines 3 t.py",
             "accelerate launch --num_machines 3 --config_file a.yaml t.py",
             says=("3 machines and no main_process_ip",)),
    LintCase("main-process-ip", f"{ON_TWO} t.py".replace("node-a", "[::1]"), f"{ON_TWO} t.py".replace("node-a",
             "[::2]"),
             says=("2 nodes that meet at ::1: each",)),
    LintCase("main-process-ip", f"{ON_TWO} t.py".replace("node-a", "localhost"), f"{ON_TWO} t.py",
             says=("2 nodes that meet at localhost",)),
    LintCase("main-process-ip", f"torchrun {TWO} --master_addr a --rdzv_backend c10d t.py",
             f"torchrun {TWO} --master_addr a --rdzv_backend static --node_rank 1 t.py",
             says=("--rdzv-backend c10d reads --rdzv-endpoint, and no --master-addr",)),
    LintCase("hostfile", "deepspeed --num_nodes 3 t.py", "deepspeed --num_nodes 3 --include n0@n1 t.py", "warning",
             says=("3 nodes and no --hostfile",)),
    LintCase("chosen-twice", "deepspeed --exclude n0:0 --num_nodes 2 t.py", "deepspeed --num_nodes 2 -H hosts t.py",
             says=("--num_nodes: --num_nodes beside",)),
    LintCase("node-rank", f"torchrun {TWO} {AT} t.py", f"torchrun --nproc_per_node 8 {AT} t.py",
             says=("2 nodes and no rank of this one: all are node 0; --node-rank, another",)),
    LintCase("node-rank", "accelerate launch --num_machines 2 --main_process_ip n0 t.py",
             "accelerate launch --num_machines 2 --config_file a.yaml t.py",
             says=("2 nodes and no rank of this one: accelerate launch stops; --machine_rank, another",)),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank 1 t.py",
             f"srun torchrun --nnodes 1 {AT} --node_rank 0 t.py", says=("says node 1 on each",)),
    LintCase("node-rank", f"#SBATCH -N 2\nsrun torchrun --nproc_per_node 8 {AT} --node_rank 0 t.py",
             f"#SBATCH -N 1\nsrun torchrun --nproc_per_node 8 {AT} --node_rank 0 t.py"),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank ${{SLURM_PROCID}} t.py",
             f"srun torchrun {TWO} {AT} --node_rank \\$SLURM_PROCID t.py",
             says=("puts in $SLURM_PROCID before srun starts", "srun bash -c '… $SLURM_PROCID …'")),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank $SLURM_NODEID t.py",
             f"srun torchrun {TWO} {AT} --node_rank $RANK_HERE t.py"),
    LintCase("tasks-and-processes", f"{BATCH}{EIGHT_TASKS}{EACH_EIGHT}",
             f"{BATCH}#SBATCH --ntasks-per-node=1\n{EACH_EIGHT}",
             says=("8 tasks a node start 8 processes each, and the job has 8 GPUs a node",)),
    LintCase("tasks-and-processes", f"{ON_N} --nproc_per_node gpu t.py", f"{ON_N} --nproc_per_node 4 t.py",
             says=("2 tasks a node start 8 processes each, and the job has 8",)),
    LintCase("tasks-and-processes", f"{EIGHT_TASKS}{EACH_EIGHT}", f"{EIGHT_TASKS}srun python t.py", "warning",
             says=("each of 8 tasks a node starts 8 processes",)),
    LintCase("one-node", f"{BATCH}torchrun {TWO} {MEET} t.py", f"{BATCH}python t.py",
             says=("the first of 2 nodes alone",)),
    LintCase("one-node", f"{BATCH}srun accelerate launch --num_processes 8 t.py",
             f"{BATCH}srun accelerate launch --config_file a.yaml t.py", "warning",
             says=("without --num_machines each",)),
    LintCase("one-node", "cat hostfile\ntorchrun --nproc_per_node 8 t.py",
             "export PET_NNODES=2\ncat hostfile\ntorchrun --nproc_per_node 8 t.py", "warning",
             says=("without --nnodes each",)),
    LintCase("one-process", "python t.py --deepspeed ds.json", "python t.py --deepspeed", "warning",
             says=("ds.json and no launcher: one",)),
    LintCase("megatron-argument", f"{WORLD_8} --global-batch-size 12", f"{WORLD_8} --global-batch-size 16",
             says=("12 is no multiple of micro batch 2 · 4 data-parallel ranks",)),
    LintCase("megatron-argument", f"{WORLD_8} --global-batch-size 12",
             f"{WORLD_8} --global-batch-size 12 --rampup-batch-size 4 4 8"),
    LintCase("megatron-argument", f"{WORLD_8} --global-batch-size 15 $MORE", f"{WORLD_8} --global-batch-size 12 $MORE",
             says=("15 is no multiple of micro batch 2;",)),
    LintCase("megatron-argument", f"{WORLD_8} --context-parallel-size 3", f"{WORLD_8} --context-parallel-size 4",
             says=("8 processes are no multiple of the 6 that share a model",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-layers 9 --pipeline-model-parallel-size 2",
             f"{WORLD_8} --num-layers 9 --pipeline-model-parallel-size $PP",
             says=("--num-layers: 9 layers are no multiple of 2 pipeline stages; use",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-layers 6 --pipeline-model-parallel-size 2 "
             "--num-layers-per-virtual-pipeline-stage 2",
             f"{WORLD_8} --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
             says=("6 layers are no multiple of 2 pipeline stages of chunks of 2;",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-attention-heads 3", f"{WORLD_8} --num-attention-heads 4",
             says=("--num-attention-heads: 3 heads are no multiple of the tensor parallel size 2",)),
    LintCase("megatron-argument", f"{WORLD_8} --hidden-size 66 --num-attention-heads 4",
             f"{WORLD_8} --hidden-size 66 --num-attention-heads 4 --kv-channels 16",
             says=("--hidden-size: 66 is no multiple of 4 heads",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-experts 6 --expert-model-parallel-size 4",
             f"{WORLD_8} --num-experts 8 --expert-model-parallel-size 4",
             says=("--num-experts: 6 experts are no multiple of the expert parallel size 4",)),
    LintCase("megatron-argument", f"{WORLD_8} --seq-length 4096 --max-position-embeddings 2048",
             f"{WORLD_8} --seq-length 4096 --max-position-embeddings 4096", says=("2048 positions for 4096 tokens",)),
    LintCase("megatron-argument", f"{WORLD_8} --fp16 --bf16", f"{WORLD_8} --bf16", says=("--fp16 and --bf16 at once",)),
    LintCase("megatron-argument", f"{WORLD_8} --fp16 --bf16", f"{WORLD_8} --fp16 --bf16".replace("pretrain_gpt", "t")),
    LintCase("megatron-argument", f"{WORLD_8} --fp16 --bf16 --num-layers 2".replace("pretrain_gpt", "t"),
             "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --fp16 --bf16"),
    LintCase("parallelism", f"{SPLIT} --num_processes 2 t.py", f"{SPLIT} t.py",
             says=("dp_shard 2 · tp 2 = 4, and num_processes is 2: accelerate",)),
    LintCase("parallelism", f"{SPLIT_BY} --parallelism_config_tp_size 8 t.py",
             f"{SPLIT_BY} --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4 t.py",
             says=("parallelism_config: dp_shard_size and cp_size are 1",)),
    LintCase("wrap-class", "accelerate launch --use_fsdp --fsdp_transformer_layer_cls_to_wrap GPT2Block t.py",
             "accelerate launch --use_fsdp --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer t.py",
             context={"model": "llama-3.1-8b"}, says=("config.sh:1: ", "GPT2Block is no class of llama-3.1-8b")),
    LintCase("broken-line", "torchrun --nproc_per_node 8 \\ \n  --nnodes 1 t.py", "torchrun --nproc_per_node 8 t.py",
             says=("config.sh:2: ", "--nnodes is a command of its own", "remove the blank behind the backslash")),
    LintCase("broken-line", "torchrun --nproc_per_node 8 t.py\n  --seed 1", "torchrun --nproc_per_node 8 t.py\ncd /\n"
             "  --seed 1", says=("config.sh:2: ", "--seed is a command", "end the line above with a backslash")),
    LintCase("broken-line", "python t.py\n# then\n  --seed 1", "python t.py\n# then\n# --seed 1",
             says=("config.sh:3: ",)),
    LintCase("given-twice", "torchrun --nproc_per_node 8 t.py --seed 1 --seed=2",
             "torchrun --nproc_per_node 8 t.py --seed 1 --seeds 2", "warning",
             says=("--seed: given as 1 and as 2: the last one",)),
    LintCase("given-twice", "python t.py --bf16 --bf16 no --bf16 yes", "python t.py --bf16 --bf16 no", "warning"),
    LintCase("all-arguments", 'torchrun --nproc_per_node "$@" t.py', "torchrun $@", "warning",
             says=("--nproc_per_node: takes the first",)),
    LintCase("all-arguments", "deepspeed $* t.py", "deepspeed $MORE t.py", "warning", says=("deepspeed takes the",)),
    LintCase("unset-variable", "GPUS=8\ntorchrun --nproc_per_node $GPU t.py", "GPUS=8\nsource x\ntorchrun "
             "--nproc_per_node $GPU t.py", "warning",
             says=("config.sh:2: ", "GPU is set nowhere here, and is empty unless", "did you mean GPUS?")),
    LintCase("unset-variable", "torchrun --nproc_per_node $((EACH * 2)) t.py",
             "torchrun --nproc_per_node $((SLURM_GPUS * 2)) t.py", "note",
             says=("EACH is set nowhere here, and is 0 unless", "or write ${EACH:?} to stop")),
    LintCase("unset-variable", "torchrun --nproc_per_node $N t.py",
             "for N in 1 2; do torchrun --nproc_per_node $N t.py; "
             "done", "note"),
    LintCase("not-read", "cd x\nuv run trl sft --model a", "cd x\nuv run python t.py", "warning",
             says=("config.sh:2: ", "what trl starts is not read")),
    LintCase("not-read", "CUDA_VISIBLE_DEVICES=0 nohup -x swift sft\npython t.py", "python t.py --swift", "note",
             says=("config.sh:1: ", "what swift starts is not read")),
    LintCase("config-file-missing", "\ndeepspeed t.py --deepspeed_config no.json",
             "deepspeed t.py --deepspeed_config $DS.json", "warning", says=("config.sh:2: ",
             "no.json is neither here")),
    LintCase("config-file-missing", "accelerate launch --config_file no.yaml t.py",
             "torchrun --nproc_per_node 8 t.py --config_file no.yaml", "warning"),
    LintCase("trainer-mismatch", OF_FOUR, f"{OF_FOUR} --bf16",
             says=("--bf16: --bf16 false by default, and bf16.enabled is true: the", 'write "auto" for bf16.enabled')),
    LintCase("trainer-mismatch", f"{OF_FOUR} --bf16 false --per_device_train_batch_size 4", f"{OF_FOUR} --bf16",
             says=("--bf16: --bf16 false by default",)),
    LintCase("trainer-mismatch", "torchrun --nproc_per_node 4 t.py --deepspeed ds.json --per_device_train_batch_size 4 "
             "--bf16", "torchrun --nproc_per_node 2 t.py --deepspeed ds.json --per_device_train_batch_size 4 --bf16",
             says=("--per_device_train_batch_size: --per_device_train_batch_size 4, --gradient_accumulation_steps 1 by "
                   "default on 4 processes, and train_batch_size is 8: the Trainer",)),
    LintCase("dropped-argument", "torchrun --nproc_per_node 8 t.py --eval_strategy no --no_cuda",
             "torchrun --nproc_per_node 8 t.py --eval_strategy no --use_cpu",
             says=("--no_cuda: transformers ", " has no such argument", "write --use_cpu")),
)  # fmt: skip

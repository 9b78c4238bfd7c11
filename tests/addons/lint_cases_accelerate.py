"""For every rule of lint a configuration that it must speak of, and a neighbour that it must not: accelerate's YAML."""

from __future__ import annotations

from typing import Any

from tests.addons.lint_cases import EIGHT, LintCase

LOCAL: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
    "num_machines": 1,
    "machine_rank": 0,
}
FILE = {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
EIGHT_IN_BF16 = {"num_processes": 8, "mixed_precision": "bf16"}


def inline(**keys: Any) -> dict[str, Any]:
    """accelerate's YAML with the DeepSpeed choices in it."""
    return LOCAL | {"deepspeed_config": keys}


def fsdp(**keys: Any) -> dict[str, Any]:
    """accelerate's YAML with FSDP2, unless another version is given."""
    return LOCAL | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2} | keys}


TWO_MACHINES, MPI = {"num_machines": 2, "main_process_ip": "n0"}, {"mpirun_config": {"mpirun_ccl": "1"}}
AT_HOME = TWO_MACHINES | {"main_process_ip": "127.0.0.1"}
ACCELERATE_CASES = (
    LintCase("unknown-key", LOCAL | {"num_proceses": 2}, LOCAL),
    LintCase("unknown-key", inline(zero_stages=2), inline(zero_stage=2)),
    LintCase("unknown-key", LOCAL | {"nobody": 2}, LOCAL, says=("no key of accelerate 1.", "; remove it")),
    LintCase("distributed-type", {"num_processes": 2}, LOCAL),
    LintCase("one-process", LOCAL | {"distributed_type": "MULTI_CPU"}, LOCAL | {"distributed_type": "MULTI_GPU"}),
    LintCase("machine-rank", LOCAL | {"machine_rank": 1}, LOCAL),
    LintCase("not-read", {"model_name_or_path": "gpt2", "learning_rate": 1e-4}, LOCAL, "warning"),
    LintCase("visible-devices", LOCAL | {"gpu_ids": "0"}, LOCAL | {"gpu_ids": "0,3"}),
    LintCase("visible-devices", LOCAL | {"gpu_ids": 0}, LOCAL | {"gpu_ids": "all"}),
    LintCase(
        "wrap-class",
        fsdp() | {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}},
        fsdp() | {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Embedding"}},
        context={"model": "llama-3.1-8b"},
    ),
    LintCase(
        "memory-not-judged",
        LOCAL | {"distributed_type": "MULTI_XPU"},
        LOCAL | {"distributed_type": "MULTI_GPU"},
        "note",
        {"model": "llama-3.2-1b", "gpus": "2xH100"},
    ),
    # Its embedding has 128,256 · 4,096 = 525,336,576 weights, and DeepSpeed's own buffer 1e8 elements.
    LintCase(
        "buffer-size",
        inline(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/tmp") | {"num_processes": 4},
        inline(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/tmp") | {"num_processes": 8},
        context=EIGHT,
        says=("deepspeed_config: a buffer of 100,000,000", "has 131,334,144; write a buffer_size of 131334144 or"),
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
        fsdp() | {"parallelism_config": {"parallelism_config_tp_size": 2}},
        fsdp() | {"parallelism_config": {"parallelism_config_dp_shard_size": 2}},
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
        fsdp(),
    ),
    LintCase(
        "fsdp2-key",
        LOCAL | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}},
        fsdp(),
        "warning",
    ),
    # What a rule says where it computes something, and its other conditions.
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
    LintCase("does-not-fit", inline(zero_stage=0) | EIGHT_IN_BF16, inline() | EIGHT_IN_BF16, context=EIGHT,
             says=("deepspeed_config.zero_stage: llama-3.1-8b at 4096 tokens, micro batch 1 peaks",)),
    LintCase("offload-for-nothing", inline(zero_stage=2, offload_optimizer_device="cpu") | EIGHT_IN_BF16,
             inline(zero_stage=2, offload_optimizer_device="none") | EIGHT_IN_BF16, "warning",
             {"model": "llama-3.2-1b", "gpus": "8xH100"}, says=("deepspeed_config: llama-3.2-1b at 4096",)),
    LintCase("prediction", inline(zero_stage=2) | EIGHT_IN_BF16, inline(zero_stage=7) | EIGHT_IN_BF16, "note", EIGHT,
             says=("on 8 H100: about",)),
    LintCase("prediction", fsdp() | EIGHT_IN_BF16, fsdp() | {"distributed_type": "NO"}, "note", EIGHT,
             says=("on 8 H100: about",)),
    LintCase("memory-not-judged", fsdp(fsdp_offload_params=True), fsdp(fsdp_offload_params=False), "note", EIGHT,
             says=("no figures for FSDP with offload, or beside",)),
    LintCase("memory-not-judged", fsdp(fsdp_version=1, fsdp_sharding_strategy="HYBRID_SHARD"),
             fsdp(fsdp_version=1, fsdp_sharding_strategy="SHARD_GRAD_OP"), "note", EIGHT,
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

"""Rules that layouts of engine=megatron break."""

from __future__ import annotations

import dataclasses

from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec, OptimizerSpec
from tests.planning.rule_cases import STARCODER, Case
from tests.support.models import megatron, torch

CASES = [
    *(
        Case(
            "multi_token_prediction",
            bad,
            says,
            megatron(ep=8),
            model="glm-4.5-air",
            change={"mtp_num_layers": 1, **change},
            good_change={"mtp_num_layers": 1, "objective": "pretrain", "lora": None},
        )
        for bad, change, says in (
            (torch(zero_stage=3), {}, "mtp_num_layers=1 with engine=torch.*use engine=megatron, or leave it out"),
            (megatron(ep=8), {"objective": "sft"}, "mtp_num_layers=1 with objective=sft; use pretrain, or"),
        )
    ),
    *(
        Case("lora", megatron(tp=2), says, megatron(tp=2), change={"lora": lora}, good_change={"lora": LoraSpec()})
        for lora, says in (
            (LoraSpec(four_bit=True), "lora.four_bit=true on engine=megatron.*use false"),
            (LoraSpec(eight_bit=True), "lora.eight_bit=true on engine=megatron, whose .* use false"),
            (LoraSpec(dropout=0.1), "lora.dropout=0.1 on engine=megatron.*use 0"),
        )
    ),
    Case(
        "lora",
        megatron(ep=8),
        "lora.targets=all-linear with glm-4.5-air.*use targets=attention",
        megatron(ep=8),
        model="glm-4.5-air",
        change={"lora": LoraSpec()},
        good_change={"lora": LoraSpec(targets="attention")},
    ),
    Case(
        "lora",
        megatron(implementation="transformer_engine"),
        "lora={…} is not supported",
        megatron(),
        change={"lora": LoraSpec()},
        good_change={"lora": LoraSpec()},
    ),
    Case(
        "optimizer",
        megatron(),
        "optimizer.name=adamw-8bit on engine=megatron, .*engine=torch or deepspeed, or .*name=adamw, sgd or muon",
        torch(zero_stage=3),
        change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case(
        "distributed_optimizer_needs_adam",
        megatron(zero_stage=1),
        "distributed optimizer steps with Adam only; use zero_stage=0",
        megatron(zero_stage=0),
        change={"optimizer": OptimizerSpec(name="sgd")},
        good_change={"optimizer": OptimizerSpec(name="muon")},
    ),
    Case(
        "muon_needs_whole_heads",
        megatron(zero_stage=0, tp=16),
        "optimizer.name=muon with tp=16 and num_key_value_heads=8: .* use a tp that divides the heads",
        megatron(zero_stage=0, tp=8),
        gpus="16xH100",
        change={"optimizer": OptimizerSpec(name="muon")},
        good_change={"optimizer": OptimizerSpec(name="muon")},
    ),
    Case(
        "width_norm_splits_key_heads",
        megatron(tp=4),
        "tp=4 with num_key_value_heads=2 .* use 1 or 2",
        megatron(tp=2),
        shape=dataclasses.replace(load_model("olmo-2-7b"), num_key_value_heads=2),
    ),
    Case(
        "queries_are_not_scaled_by_position",
        megatron(),
        "seq_length=32768 .* use at most 16384, or layout.engine=torch",
        megatron(),
        model="ministral-3-8b",
        change={"seq_length": 32768},
        good_change={"seq_length": 16384},
    ),
    Case("world_size", megatron(tp=2, dp=2, gradient_accumulation_steps=64), "use dp=4", megatron(tp=2)),
    Case(
        "fp8_needs_transformer_engine",
        megatron(),
        "use implementation=transformer_engine, or bf16",
        megatron(implementation="transformer_engine"),
        change={"precision": "fp8"},
        good_change={"precision": "fp8"},
    ),
    Case(
        "fp8_units",
        megatron(implementation="transformer_engine"),
        "A100-80, which has no fp8",
        megatron(implementation="transformer_engine"),
        gpus="8xA100-80",
        good_gpus="8xH100",
        change={"precision": "fp8"},
        good_change={"precision": "fp8"},
    ),
    Case(
        "transformer_engine_needs_cuda",
        megatron(implementation="transformer_engine"),
        "its kernels are for GPUs",
        megatron(),
        gpus="8xcpu",
    ),
    Case("flag_of_engine", megatron(gradient_compression="bf16"), "engine=megatron", megatron()),
    Case("flag_of_engine", megatron(offload_param="cpu"), "offload_param=cpu on engine=megatron", megatron()),
    *(
        Case(
            "optimizer_on_the_host",
            megatron(**{"offload_optimizer": "cpu"} | bad),
            said,
            megatron(offload_optimizer="cpu", tp=2),
            change={"precision": "bf16"} | change,
            good_change={"precision": "bf16", "lora": None},
        )
        for bad, said, change in (
            (
                {"offload_optimizer": "none", "optimizer_offload_fraction": 0.5},
                "optimizer_offload_fraction=0.5 with offload_optimizer=none; use offload_optimizer=cpu",
                {},
            ),
            ({"offload_optimizer": "nvme"}, "disks, which it does not use; use cpu, or leave it out", {}),
            ({"zero_stage": 0}, "zero_stage=0; use zero_stage=1", {}),
            ({}, "precision=fp32; use bf16", {"precision": "fp32"}),
            ({}, "LoRA, whose optimizer is small", {"lora": LoraSpec()}),
        )
    ),
    Case(
        "short_gradients_of_bf16",
        megatron(gradient_dtype="bf16"),
        "gradient_dtype=bf16 with precision=fp32, .*use bf16",
        megatron(gradient_dtype="bf16"),
        change={"precision": "fp32"},
        good_change={"precision": "bf16"},
    ),
    *(
        Case(
            "fp8_weights",
            megatron(implementation="transformer_engine", fp8_param_gather=True, **bad),
            f"fp8_param_gather=true with {said}, or leave it out",
            megatron(implementation="transformer_engine", fp8_param_gather=True),
            change={"precision": precision},
            good_change={"precision": "fp8"},
        )
        for bad, said, precision in (
            ({}, "precision=bf16; use fp8", "bf16"),
            ({"zero_stage": 0}, "zero_stage=0; use zero_stage=1", "fp8"),
        )
    ),
    *(
        Case(
            "recompute_modules",
            megatron(**{"recompute": "selective"} | bad),
            f"recompute_modules={said}, or leave it out",
            megatron(recompute="selective", recompute_modules=("core_attn", "mlp")),
        )
        for bad, said in (
            ({"recompute": "full", "recompute_modules": ("mlp",)}, "mlp with recompute=full; use selective"),
            ({"recompute_modules": ("moe", "mlp")}, "mlp, moe with moe, which llama-3.1-8b does not have; take it out"),
            (
                {"recompute_modules": ("mla_up_proj",)},
                "mla_up_proj with mla_up_proj, which llama-3.1-8b does not have; take it out",
            ),
            (
                {"recompute_modules": ("layernorm",)},
                "layernorm with implementation=local, .* core_attn, mlp, moe alone",
            ),
        )
    ),
    *(
        Case(
            "bf16_state",
            megatron(**{"implementation": "transformer_engine", "optimizer_state_dtype": "bf16"} | bad),
            f"optimizer_state_dtype=bf16 with {said}, or leave it out",
            megatron(implementation="transformer_engine", optimizer_state_dtype="bf16", tp=2),
            change={"precision": "bf16"},
            good_change={"precision": "bf16"},
        )
        for bad, said in (
            ({"implementation": "local"}, "implementation=local; use transformer_engine"),
            ({"zero_stage": 0}, "zero_stage=0; use 1 or more"),
            ({"offload_optimizer": "cpu"}, "the optimizer on the host; use one of them"),
        )
    ),
    Case(
        "host_ram",
        megatron(offload_optimizer="cpu", tp=8, pp=2, ep=8, sp=True),
        "GiB of host memory a node, and of the 1152 GiB of",
        megatron(tp=8, pp=2, ep=8, sp=True),
        model="qwen3-235b-a22b",
        change={"precision": "bf16"},
        gpus="p4d.24xlarge:2",
    ),
    Case("megatron_family", megatron(), "which has llama, mistral", torch(zero_stage=3), shape=STARCODER),
    Case("megatron_family", megatron(), "or Megatron-Bridge without kit", torch(zero_stage=3), model="gemma-7b"),
    Case(
        "router_weights_add_up",
        megatron(),
        "norm_topk_prob=False, experts_per_token=8 of deepseek-v3",
        torch(zero_stage=3),
        shape=dataclasses.replace(load_model("deepseek-v3"), norm_topk_prob=False),
    ),
    Case(
        "router_groups_of_two",
        megatron(),
        "router_top_groups=2 with experts_per_token=8",
        torch(zero_stage=3),
        shape=dataclasses.replace(load_model("deepseek-v3"), router_top_groups=2),
    ),
    Case(
        "ring_without_mla",
        megatron(cp=2, cp_comm_type="p2p"),
        "values are narrower",
        megatron(cp=2),
        model="deepseek-v3",
    ),
    Case(
        "ring_needs_fused_attention",
        megatron(cp=2, cp_comm_type="p2p"),
        "there is no flash kernel",
        megatron(cp=2),
        model="gemma-2-9b",
    ),
    Case("megatron_zero", megatron(zero_stage=2), "distributed optimizer is stage 1", megatron(zero_stage=1)),
    Case("tp_divides_heads", megatron(tp=8), "use 1, 2 or 4", megatron(tp=4), model="qwen2.5-7b"),
    Case(
        "pipeline_divides_layers",
        megatron(pp=4),
        "pp=4 does not divide num_layers=126",
        megatron(pp=2),
        model="llama-3.1-405b",
    ),
    Case("pipeline_divides_layers", megatron(pp=4, vp=3), "pp·vp=4·3", megatron(pp=4, vp=4)),
    Case(
        "uneven_stages_add_up",
        megatron(pp=8, first_stage_layers=15),
        "leave 111 layers of llama-3.1-405b for 7 other stages; leave a multiple of 7",
        megatron(pp=8, first_stage_layers=15, last_stage_layers=15),
        model="llama-3.1-405b",
    ),
    Case(
        "uneven_stages_add_up",
        megatron(pp=2, first_stage_layers=15, last_stage_layers=16),
        "first_stage_layers=15, last_stage_layers=16 are not num_layers=32",
        megatron(pp=2, first_stage_layers=15, last_stage_layers=17),
    ),
    Case(
        "uneven_stages_fill_chunks",
        megatron(pp=4, vp=8, first_stage_layers=5, last_stage_layers=11),
        "use at least 7 layers",
        megatron(pp=4, vp=8, first_stage_layers=7, last_stage_layers=9),
    ),
    Case("uneven_stages_need_pipeline", megatron(first_stage_layers=15), "with pp=1: there is one stage", megatron()),
    Case("virtual_stages_need_pipeline", megatron(vp=2), "vp=2 with pp=1", megatron(pp=2, vp=2)),
    Case(
        "virtual_stages_group_batches",
        megatron(pp=4, vp=2),
        "groups of pp=4",
        megatron(pp=4, vp=2),
        change={"global_batch_size": 12},
        good_change={"global_batch_size": 16},
    ),
    Case("experts_exist", megatron(ep=2), "has no experts", megatron()),
    Case(
        "ep_divides_experts",
        megatron(ep=16),
        "ep=16 does not divide",
        megatron(ep=8),
        model="mixtral-8x7b",
        gpus="16xH100",
    ),
    Case("ep_divides_ranks", megatron(pp=4, ep=4), "ep·etp=4·1 does not", megatron(pp=4, ep=2), model="mixtral-8x7b"),
    Case(
        "etp_follows_tp",
        megatron(tp=2, sp=True),
        "use etp=2",
        megatron(tp=2, sp=True, etp=2),
        model="mixtral-8x7b",
    ),
    Case(
        "experts_need_sequence_parallel",
        megatron(tp=2, etp=2),
        "use sp=true",
        megatron(tp=2, etp=2, sp=True),
        model="mixtral-8x7b",
    ),
    Case("sequence_parallel_needs_tp", megatron(sp=True), "sp=true with tp=1", megatron(tp=2, sp=True)),
    Case(
        "sequence_parallel_divides",
        megatron(tp=4, sp=True),
        "use a multiple of 4",
        megatron(tp=4, sp=True),
        change={"seq_length": 4098},
        good_change={"seq_length": 4100},
    ),
    Case(
        "context_parallel",
        megatron(cp=4),
        "use a multiple of 8",
        megatron(cp=4),
        change={"seq_length": 4100},
        good_change={"seq_length": 4104},
    ),
    Case(
        "ring_without_window",
        megatron(cp=2, cp_comm_type="p2p"),
        "sliding_window=4096 of mistral-7b-v0.1",
        megatron(cp=2),
        model="mistral-7b-v0.1",
        change={"seq_length": 8192},
        good_change={"seq_length": 8192},
    ),
    Case(
        "ring_needs_16_bits",
        megatron(cp=2, cp_comm_type="p2p"),
        "no flash kernel",
        megatron(cp=2),
        change={"precision": "fp32"},
    ),
    Case(
        "transformer_engine_family",
        megatron(implementation="transformer_engine"),
        "its layers are for llama, mistral",
        megatron(),
        model="gemma-2-9b",
    ),
    Case(
        "flag_of_engine",
        megatron(chunked_loss=True),
        "chunked_loss=true on engine=megatron, .* use engine=torch or deepspeed",
        torch(zero_stage=3, chunked_loss=True),
    ),
    Case(
        "flag_of_engine",
        megatron(compile_layers=True),
        "compile_layers=true on engine=megatron",
        torch(zero_stage=3, compile_layers=True),
    ),
    Case(
        "etp_without_biases",
        megatron(tp=2, sp=True, ep=2, etp=2),
        "does not split experts that have biases",
        megatron(tp=2, sp=True, ep=2),
        model="gpt-oss-20b",
    ),
    Case(
        "etp_divides_experts",
        megatron(tp=8, sp=True, ep=1, etp=8),
        "etp=8 does not divide moe_ffn_hidden_size=1412",
        megatron(tp=4, sp=True, ep=1, etp=4),
        shape=dataclasses.replace(load_model("mixtral-8x7b"), moe_ffn_hidden_size=1412),
    ),
    Case(
        "expert_load_of_experts",
        megatron(tp=2),
        "expert_load=1.5 with llama-3.1-8b, which has no experts",
        megatron(tp=2),
        change={"expert_load": 1.5},
        good_change={"expert_load": 1.0},
    ),
]

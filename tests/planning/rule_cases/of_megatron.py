"""Rules that layouts of engine=megatron break."""

from __future__ import annotations

import dataclasses

from kit.specs.catalog import load_model
from kit.specs.job import OptimizerSpec
from tests.planning.examples import megatron, torch
from tests.planning.rule_cases import STARCODER, Case

CASES = [
    Case(
        "supported_job",
        megatron(),
        "optimizer.name=adamw-8bit on engine=megatron, .* use engine=torch, or optimizer.name=adamw",
        torch(zero_stage=3),
        change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case("world_size", megatron(tp=2, dp=2, gradient_accumulation_steps=64), "use dp=4", megatron(tp=2)),
    Case(
        "fp8",
        megatron(),
        "use implementation=transformer_engine, or bf16",
        megatron(implementation="transformer_engine"),
        change={"precision": "fp8"},
        good_change={"precision": "fp8"},
    ),
    Case(
        "fp8",
        megatron(implementation="transformer_engine"),
        "A100-80, which has no fp8",
        megatron(implementation="transformer_engine"),
        gpus="8xA100-80",
        good_gpus="8xH100",
        change={"precision": "fp8"},
        good_change={"precision": "fp8"},
    ),
    Case(
        "implementation",
        megatron(implementation="transformer_engine"),
        "its kernels are for GPUs",
        megatron(),
        gpus="8xcpu",
    ),
    Case("compression_has_a_hook", megatron(gradient_compression="bf16"), "engine=megatron", megatron()),
    Case("no_offload", megatron(offload_optimizer="cpu"), "offload_optimizer=cpu on engine=megatron", megatron()),
    Case("megatron_family", megatron(), "which has llama, mistral", torch(zero_stage=3), shape=STARCODER),
    Case(
        "expert_router",
        megatron(),
        "norm_topk_prob=False, experts_per_token=8 of deepseek-v3",
        torch(zero_stage=3),
        shape=dataclasses.replace(load_model("deepseek-v3"), norm_topk_prob=False),
    ),
    Case(
        "expert_router",
        megatron(),
        "router_top_groups=2 with experts_per_token=8",
        torch(zero_stage=3),
        shape=dataclasses.replace(load_model("deepseek-v3"), router_top_groups=2),
    ),
    Case("ring", megatron(cp=2, cp_comm_type="p2p"), "values are narrower", megatron(cp=2), model="deepseek-v3"),
    Case("ring", megatron(cp=2, cp_comm_type="p2p"), "no flash kernel computes", megatron(cp=2), model="gemma-2-9b"),
    Case("megatron_zero", megatron(zero_stage=2), "distributed optimizer is stage 1", megatron(zero_stage=1)),
    Case("tp_divides_heads", megatron(tp=8), "use 1, 2, 4, 7, 14 or 28", megatron(tp=4), model="qwen2.5-7b"),
    Case(
        "pipeline_divides_layers",
        megatron(pp=4),
        "pp=4 does not divide num_layers=126",
        megatron(pp=2),
        model="llama-3.1-405b",
    ),
    Case("pipeline_divides_layers", megatron(pp=4, vp=3), "pp·vp=4·3", megatron(pp=4, vp=4)),
    Case(
        "pipeline_divides_layers",
        megatron(pp=8, first_stage_layers=15),
        "leave 111 layers of llama-3.1-405b for 7 other stages; leave a multiple of 7",
        megatron(pp=8, first_stage_layers=15, last_stage_layers=15),
        model="llama-3.1-405b",
    ),
    Case(
        "pipeline_divides_layers",
        megatron(pp=2, first_stage_layers=15, last_stage_layers=16),
        "first_stage_layers=15, last_stage_layers=16 are not num_layers=32",
        megatron(pp=2, first_stage_layers=15, last_stage_layers=17),
    ),
    Case(
        "pipeline_divides_layers",
        megatron(pp=4, vp=8, first_stage_layers=5, last_stage_layers=11),
        "use at least 7 layers",
        megatron(pp=4, vp=8, first_stage_layers=7, last_stage_layers=9),
    ),
    Case("pipeline_divides_layers", megatron(first_stage_layers=15), "with pp=1: there is one stage", megatron()),
    Case("virtual_stages", megatron(vp=2), "vp=2 with pp=1", megatron(pp=2, vp=2)),
    Case(
        "virtual_stages",
        megatron(pp=4, vp=2),
        "groups of pp=4",
        megatron(pp=4, vp=2),
        change={"global_batch_size": 12},
        good_change={"global_batch_size": 16},
    ),
    Case("expert_parallel", megatron(ep=2), "has no experts", megatron()),
    Case("expert_parallel", megatron(ep=16), "ep=16 does not divide", megatron(ep=8), model="mixtral-8x7b"),
    Case("expert_parallel", megatron(pp=4, ep=4), "ep·etp=4·1 does not", megatron(pp=4, ep=2), model="mixtral-8x7b"),
    Case(
        "expert_tensor_parallel",
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
    Case("sequence_parallel", megatron(sp=True), "sp=true with tp=1", megatron(tp=2, sp=True)),
    Case(
        "sequence_parallel",
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
        "ring",
        megatron(cp=2, cp_comm_type="p2p"),
        "sliding_window=4096 of mistral-7b-v0.1",
        megatron(cp=2),
        model="mistral-7b-v0.1",
        change={"seq_length": 8192},
        good_change={"seq_length": 8192},
    ),
    Case(
        "ring",
        megatron(cp=2, cp_comm_type="p2p"),
        "no flash kernel",
        megatron(cp=2),
        change={"precision": "fp32"},
    ),
]

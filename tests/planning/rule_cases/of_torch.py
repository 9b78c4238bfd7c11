"""Rules that layouts of engine=torch break."""

from __future__ import annotations

import dataclasses
from typing import Any

from kit.specs.job import BalancingSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Layout
from tests.planning.rule_cases import LLAMA, STARCODER, Case
from tests.support.models import deepspeed, megatron, torch

_SEQUENCES = BalancingSpec(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-4)
FOUR_BIT = LoraSpec(four_bit=True, quantize_moe_experts=True)
ON_HOST = torch(zero_stage=3, offload_param="cpu", offload_optimizer="cpu")


def context(**changes: Any) -> Layout:
    """FSDP2 with a ring of two ranks."""
    return torch(**{"zero_stage": 3, "cp": 2, "cp_comm_type": "p2p", **changes})


CASES = [
    *(
        Case(
            "dora",
            bad,
            says,
            torch(zero_stage=3),
            model=model,
            change={"lora": lora},
            good_change={"lora": LoraSpec(use_dora=True)},
        )
        for bad, lora, model, says in (
            (deepspeed(zero_stage=3), LoraSpec(use_dora=True), LLAMA, "use_dora=true with zero_stage=3 on .*at most 2"),
            (torch(zero_stage=3), LoraSpec(use_dora=True, four_bit=True), LLAMA, "with four_bit=true"),
            (torch(), LoraSpec(use_dora=True, eight_bit=True), LLAMA, "with eight_bit=true"),
        )
    ),
    *(
        Case(
            "eight_bit_is_whole",
            bad,
            says,
            good,
            change={"lora": LoraSpec(eight_bit=True)},
            good_change={"lora": LoraSpec(eight_bit=True)},
        )
        for bad, good, says in (
            (
                torch(zero_stage=3),
                torch(dp=8),
                "eight_bit=true with zero_stage=3 on engine=torch.*use zero_stage=0, or",
            ),
            (torch(zero_stage=2), torch(), "eight_bit=true with zero_stage=2 on engine=torch.*use zero_stage=0, or"),
            (
                deepspeed(zero_stage=3),
                deepspeed(zero_stage=2),
                "eight_bit=true with zero_stage=3 on .*use zero_stage=0, 1 or",
            ),
        )
    ),
    Case(
        "compile_whole_layers",
        torch(compile_layers=True),
        "tp>1, cp>1 or quantised weights",
        torch(compile_layers=True),
        change={"lora": LoraSpec(eight_bit=True)},
        good_change={"lora": LoraSpec()},
    ),
    *(
        Case(
            "quantised_experts",
            bad,
            f"quantize_moe_experts=true with {says}",
            torch(recompute="full", dp=8),
            model=model,
            change={"lora": lora, "objective": objective},
            good_change={"lora": LoraSpec(four_bit=True) if model == LLAMA else FOUR_BIT, "objective": "sft"},
        )
        for bad, lora, model, objective, says in (
            (
                torch(recompute="full"),
                dataclasses.replace(FOUR_BIT, four_bit=False),
                "mixtral-8x7b",
                "sft",
                "four_bit=false; use",
            ),
            (torch(recompute="full"), FOUR_BIT, LLAMA, "sft", "llama-3.1-8b, which has no experts"),
            (torch(recompute="full"), FOUR_BIT, "mixtral-8x7b", "dpo", "objective=dpo, whose trainer is TRL"),
            (deepspeed(recompute="full"), FOUR_BIT, "mixtral-8x7b", "sft", "engine=deepspeed; use torch"),
            (torch(recompute="full", zero_stage=3), FOUR_BIT, "mixtral-8x7b", "sft", "zero_stage>0, tp>1 or ep>1"),
            (torch(), FOUR_BIT, "mixtral-8x7b", "sft", "recompute=none, which keeps .* use full"),
        )
    ),
    Case(
        "balancing",
        torch(zero_stage=3),
        "job.balancing with llama-3.1-8b, which has no experts",
        torch(zero_stage=3),
        change={"balancing": _SEQUENCES},
        good_change={"balancing": None},
    ),
    Case(
        "balancing",
        torch(zero_stage=3),
        "objective=sft, whose padding would count",
        torch(zero_stage=3),
        model="mixtral-8x7b",
        change={"balancing": _SEQUENCES, "objective": "sft"},
        good_change={"objective": "pretrain"},
    ),
    Case(
        "balancing",
        torch(zero_stage=3),
        "moe_router_bias_update_rate=0.001 with mixtral-8x7b, whose router has no expert bias",
        torch(zero_stage=3),
        model="mixtral-8x7b",
        change={"balancing": BalancingSpec(moe_router_bias_update_rate=1e-3)},
        good_change={"balancing": None},
    ),
    Case(
        "balancing",
        torch(zero_stage=3),
        "moe_expert_capacity_factor=1.25 on engine=torch, which drops no tokens; use engine=megatron",
        megatron(),
        model="mixtral-8x7b",
        change={"balancing": BalancingSpec(moe_expert_capacity_factor=1.25)},
    ),
    Case(
        "bf16_units",
        torch(),
        "Titan-RTX, which has no bf16",
        torch(),
        gpus="1xTitan-RTX",
        good_change={"precision": "fp32"},
    ),
    Case(
        "positions",
        torch(),
        "use at most 1024",
        torch(),
        model="gpt2",
        change={"seq_length": 2048},
        good_change={"seq_length": 1024},
    ),
    Case(
        "implementation",
        dataclasses.replace(torch(), implementation="local"),
        "use huggingface",
        torch(),
    ),
    Case(
        "objective_of_stacks",
        torch(),
        "use pretrain or sft",
        torch(),
        change={"objective": "seq2seq"},
        good_change={"objective": "sft"},
    ),
    Case("flag_of_engine", torch(sp=True), "sp=true on engine=torch", torch()),
    Case(
        "precision",
        torch(zero_stage=2),
        "precision=fp16 is not supported",
        deepspeed(zero_stage=2),
        change={"precision": "fp16"},
        good_change={"precision": "fp16"},
    ),
    Case(
        "flag_of_engine",
        torch(autocast=True),
        "autocast=true on engine=torch, which does not take it; use engine=deepspeed",
        torch(),
    ),
    Case(
        "compression_has_a_hook",
        torch(zero_stage=2, gradient_compression="powersgd"),
        r"zero_stage=0 \(DDP\)",
        torch(gradient_compression="powersgd"),
    ),
    Case("compression_needs_ranks", torch(gradient_compression="bf16"), "nothing is sent", torch(), gpus="1xH100"),
    Case(
        "flag_of_engine",
        torch(zero_stage=3, zero_quantized_weights=True),
        "zero_quantized_weights=true on engine=torch",
        torch(zero_stage=3),
    ),
    Case("torch_tp_needs_fsdp2", torch(tp=2), "needs FSDP2", torch(tp=2, zero_stage=3)),
    Case(
        "torch_tp_family",
        torch(tp=2, zero_stage=3),
        "tensor parallelism is implemented for llama, mistral, qwen2",
        torch(zero_stage=3),
        model="gpt2",
        change={"seq_length": 1024},
    ),
    Case(
        "torch_tp_divides",
        torch(tp=16, zero_stage=3),
        "use a divisor of both",
        torch(tp=8, zero_stage=3),
        gpus="16xH100",
    ),
    Case("torch_zero", torch(zero_stage=1), r"FSDP2 \(2 and 3\)", torch(zero_stage=3)),
    Case(
        "precision",
        torch(),
        "precision=fp16 is not supported; use bf16, fp32 or fp8",
        torch(),
        change={"precision": "fp16"},
        good_change={"precision": "fp32"},
    ),
    Case(
        "muon_needs_matrices",
        torch(zero_stage=3),
        "whose experts are one tensor of three dimensions",
        torch(zero_stage=3),
        model="qwen1.5-moe-a2.7b",
        change={"optimizer": OptimizerSpec(name="muon")},
        good_change={"optimizer": OptimizerSpec(name="adafactor")},
    ),
    *(
        Case("selective_recompute", bad, says, good, model=model, change=change, good_change=dict.fromkeys(change))
        for bad, says, good, model, change in (
            (
                deepspeed(recompute="selective"),
                "with engine=deepspeed, where it was not tested",
                deepspeed(),
                LLAMA,
                {},
            ),
            (context(recompute="selective"), "with tp=1, cp=2", context(), LLAMA, {}),
            (
                torch(zero_stage=3, recompute="selective"),
                "the experts of mixtral-8x7b",
                torch(zero_stage=3),
                "mixtral-8x7b",
                {},
            ),
            (torch(recompute="selective"), "gemma-2-9b, whose layers", torch(), "gemma-2-9b", {}),
            (torch(recompute="selective"), "with job.lora", torch(recompute="selective"), LLAMA, {"lora": LoraSpec()}),
            (torch(zero_stage=3, recompute="selective", tiled_mlp=True), "tiled_mlp", torch(zero_stage=3), LLAMA, {}),
        )
    ),
    Case(
        "chunked_loss_whole_head",
        torch(tp=2, zero_stage=3, chunked_loss=True),
        "needs a whole head",
        torch(zero_stage=3, chunked_loss=True),
    ),
    Case("tp_or_cp", context(tp=2), "one or the other", context()),
    Case("cp_comm_type", context(cp_comm_type="all_gather"), "use p2p or a2a", context()),
    Case("torch_cp_needs_fsdp2", context(zero_stage=0), "FSDP2 sums the gradients", context()),
    Case(
        "torch_cp_family",
        context(),
        "it was tested with decoders",
        torch(zero_stage=3),
        model="qwen3-next-80b-a3b",
    ),
    Case(
        "torch_cp_precision",
        context(cp_comm_type="a2a"),
        "precision=fp8 on engine=torch was not tested",
        context(cp_comm_type="a2a"),
        change={"precision": "fp8"},
        good_change={"precision": "bf16"},
    ),
    Case(
        "cp_needs_fused_attention",
        context(),
        "no flash kernel",
        torch(zero_stage=3),
        model="gemma-2-9b",
    ),
    Case(
        "experts_exist",
        torch(zero_stage=3, ep=2),
        "which has no experts",
        torch(zero_stage=3),
    ),
    Case(
        "ep_divides_experts",
        torch(zero_stage=3, ep=8),
        "ep=8 does not divide num_experts=60 of qwen1.5-moe-a2.7b; use 1, 2 or 4",
        torch(zero_stage=3, ep=4),
        model="qwen1.5-moe-a2.7b",
    ),
    *(
        Case(
            "torch_expert_parallel",
            bad,
            says,
            torch(zero_stage=3, ep=2),
            model="mixtral-8x7b",
            change=change,
            good_change=good,
        )
        for bad, says, change, good in (
            (torch(zero_stage=0, ep=2), "experts are spread beside FSDP2; use zero_stage=2 or 3", {}, {}),
            (torch(zero_stage=3, ep=2), "job.lora, whose experts are frozen", {"lora": LoraSpec()}, {"lora": None}),
            (torch(zero_stage=3, ep=2), "precision=fp8; use bf16", {"precision": "fp8"}, {"precision": "bf16"}),
            (
                torch(zero_stage=3, ep=2),
                "optimizer.name=lion; use adamw",
                {"optimizer": OptimizerSpec(name="lion")},
                {"optimizer": OptimizerSpec()},
            ),
        )
    ),
    Case(
        "cp_without_window",
        context(),
        "attention masks are dropped",
        torch(zero_stage=3),
        model="mistral-7b-v0.1",
        change={"seq_length": 8192},
    ),
    Case(
        "ulysses_divides_heads",
        context(cp=8, cp_comm_type="a2a"),
        "use 1, 2 or 4",
        context(cp=8),
        model="qwen2.5-7b",
    ),
    Case(
        "context_parallel",
        context(cp=4),
        "use a multiple of 8",
        context(cp=4),
        change={"seq_length": 4100},
        good_change={"seq_length": 4104},
    ),
    Case(
        "ring_needs_16_bits",
        context(),
        "use a2a, or bf16",
        context(cp_comm_type="a2a"),
        change={"precision": "fp32"},
    ),
    Case(
        "ring_kernel",
        context(attention_kernel="cudnn"),
        "merged by",
        context(attention_kernel="cudnn", cp_comm_type="a2a"),
    ),
    Case(
        "offloads_layer_inputs",
        torch(zero_stage=3, activation_offloading=True),
        "use recompute=full",
        torch(zero_stage=3, activation_offloading=True, recompute="full"),
    ),
    Case(
        "offloads_of_eager_layers",
        torch(zero_stage=3, activation_offloading=True, recompute="full", compile_layers=True),
        "without compiling",
        torch(zero_stage=3, activation_offloading=True, recompute="full"),
    ),
    Case(
        "tiled_mlp_dense",
        torch(zero_stage=3, tiled_mlp=True),
        "tiled_mlp=true with mixtral-8x7b",
        torch(zero_stage=3),
        model="mixtral-8x7b",
    ),
    Case("tiled_mlp_dense", torch(tiled_mlp=True), "tiled_mlp=true with bloom-1b7", torch(), model="bloom-1b7"),
    Case(
        "tiled_mlp_alone",
        torch(zero_stage=3, tiled_mlp=True, compile_layers=True),
        "compile_layers=true",
        torch(zero_stage=3, tiled_mlp=True),
    ),
    Case(
        "tiled_mlp_alone",
        torch(tp=2, zero_stage=3, tiled_mlp=True),
        "tp>1",
        torch(zero_stage=3, tiled_mlp=True),
    ),
    *(
        Case(
            "bf16_state",
            torch(**{"optimizer_state_dtype": "bf16"} | bad),
            f"optimizer_state_dtype=bf16 with {said}",
            torch(optimizer_state_dtype="bf16", bf16_stochastic_round=True),
            change={"precision": "bf16"} | change,
            good_change={"precision": "bf16", "optimizer": OptimizerSpec(), "lora": None},
        )
        for bad, said, change in (
            ({}, "precision=fp8; use bf16", {"precision": "fp8"}),
            ({}, "optimizer.name=muon; use adamw or adamw-8bit", {"optimizer": OptimizerSpec(name="muon")}),
            ({}, "LoRA, whose optimizer is small", {"lora": LoraSpec()}),
            ({"gradient_compression": "bf16"}, "gradient_compression=bf16, of fp32 gradients", {}),
            (
                {"zero_stage": 3, "gradient_dtype": "bf16", "micro_batch_size": 16},
                "gradient_dtype=bf16, which it includes",
                {"optimizer": OptimizerSpec(name="adamw-8bit")},
            ),
        )
    ),
    Case(
        "paged_needs_whole_matrices",
        torch(zero_stage=3),
        "paged-adamw-8bit with zero_stage=3: bitsandbytes' class does not step DTensors",
        torch(),
        change={"optimizer": OptimizerSpec(name="paged-adamw-8bit")},
        good_change={"optimizer": OptimizerSpec(name="paged-adamw-8bit")},
    ),
    Case(
        "stochastic_round",
        torch(bf16_stochastic_round=True),
        "rounds weights of optimizer_state_dtype=bf16",
        torch(optimizer_state_dtype="bf16", bf16_stochastic_round=True),
    ),
    Case(
        "stochastic_round",
        torch(tp=2, zero_stage=3, optimizer_state_dtype="bf16", bf16_stochastic_round=True),
        "would round them apart; use tp=1",
        torch(tp=2, zero_stage=3, optimizer_state_dtype="bf16"),
    ),
    Case("gradient_dtype_needs_fsdp2", torch(gradient_dtype="bf16"), "it is for FSDP2", torch()),
    Case(
        "gradient_dtype_needs_8bit_adamw",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=16),
        "it is for adamw-8bit",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=16),
        good_change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case(
        "gradient_dtype_without_accumulation",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=8),
        "gradient_accumulation_steps=2: every sum",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=16),
        change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case(
        "compile_whole_layers",
        torch(tp=2, zero_stage=3, compile_layers=True),
        "graphs break at every layer",
        torch(zero_stage=3, compile_layers=True),
    ),
    Case(
        "fp8_units",
        torch(zero_stage=3),
        "A100-80, which has no fp8",
        torch(zero_stage=3),
        gpus="8xA100-80",
        good_gpus="8xcpu",  # emulated
        change={"precision": "fp8"},
    ),
    Case(
        "fp8_linear_layers",
        torch(zero_stage=3),
        "Conv1D",
        torch(zero_stage=3),
        model="gpt2",
        change={"precision": "fp8", "seq_length": 1024},
        good_change={"precision": "bf16"},
    ),
    Case(
        "fp8_whole_decoders",
        torch(zero_stage=3, tp=2),
        "with tp=2: it was tested on decoders",
        torch(zero_stage=3),
        change={"precision": "fp8"},
    ),
    Case(
        "fp8_whole_decoders",
        torch(),
        "with job.lora: it was tested",
        torch(zero_stage=2),
        change={"precision": "fp8", "lora": LoraSpec()},
        good_change={"lora": None},
    ),
    Case(
        "fp8_hidden_size",
        torch(zero_stage=3),
        "hidden_size=1000 of odd",
        torch(zero_stage=3, compile_layers=True, chunked_loss=True),
        shape=dataclasses.replace(
            STARCODER, name="odd", hidden_size=1000, num_attention_heads=4, num_key_value_heads=4, head_dim=250
        ),
        change={"precision": "fp8"},
        good_change={"precision": "bf16"},
    ),
    Case(
        "fp8_tokens",
        torch(),
        r"micro_batch_size·seq_length=1000.*use seq_length=1008",
        torch(),
        change={"precision": "fp8", "seq_length": 1000},
        good_change={"seq_length": 1008},
    ),
    Case(
        "attention_kernel_bits",
        torch(zero_stage=3, attention_kernel="cudnn"),
        "in fp32: this kernel needs a GPU and 16 bits",
        torch(zero_stage=3, attention_kernel="cudnn"),
        change={"precision": "fp32"},
        good_change={"precision": "bf16"},
    ),
    Case(
        "attention_kernel_generation",
        torch(zero_stage=3, attention_kernel="flash3"),
        "attention_kernel=flash3 on A100-80: it has kernels for hopper GPUs alone",
        torch(zero_stage=3, attention_kernel="cudnn"),
        gpus="8xA100-80GB",
    ),
    *(
        Case(
            "attention_kernel_rocm",
            torch(zero_stage=3, attention_kernel=kernel),
            f"attention_kernel={kernel} on {gpu}: torch's ROCm build has AOTriton's .* leave it out",
            torch(zero_stage=3),
            gpus=f"8x{gpu}",
            good_gpus=f"8x{gpu}",
        )
        for kernel, gpu in (("cudnn", "MI300X"), ("flash3", "MI355X"))
    ),
    Case(
        "attention_kernel_family",
        torch(zero_stage=3, attention_kernel="cudnn"),
        "whose attention has no fused kernel",
        torch(zero_stage=3),
        model="gemma-2-2b",
    ),
    Case(
        "chunked_loss_decoder",
        torch(chunked_loss=True),
        "scales or shifts logits",
        torch(),
        model="bart-large",
        change={"seq_length": 128, "objective": "seq2seq"},
    ),
    Case(
        "fast_path_family",
        torch(chunked_loss=True),
        "model type qwen3_next is none of the families",
        torch(),
        model="qwen3-next-80b-a3b",
    ),
    Case(
        "lora_layers",
        torch(),
        "lora.target_modules has w1, which kit does not know of llama-3.1-8b; use q_proj, k_proj, v_proj, o_proj",
        torch(),
        change={"lora": LoraSpec(target_modules=("q_proj", "w1"))},
        good_change={"lora": LoraSpec(target_modules=("q_proj", "up_proj"))},
    ),
    Case(
        "lora_layers",
        torch(),
        "lora.target_modules has q_proj, which kit does not know of phi-3-mini-4k; leave it",
        torch(),
        model="phi-3-mini-4k",
        change={"lora": LoraSpec(target_modules=("q_proj",))},
        good_change={"lora": LoraSpec()},
    ),
    Case(
        "lora_layers",
        torch(),
        "lora.rank_pattern has up_proj, which gets no adapter; leave it out",
        torch(),
        change={"lora": LoraSpec(targets="attention", rank_pattern={"up_proj": 4})},
        good_change={"lora": LoraSpec(rank_pattern={"up_proj": 4})},
    ),
    Case(
        "lora_layers",
        torch(),
        "lora.rank_pattern with adapters on the shared experts of",
        torch(),
        model="glm-4.5-air",
        change={"lora": LoraSpec(rank_pattern={"q_proj": 4})},
        good_change={"lora": LoraSpec(target_modules=("q_proj",), rank_pattern={"q_proj": 4})},
    ),
    Case(
        "lora_layers",
        megatron(tp=2),
        "lora.target_modules has q_proj alone on engine=megatron, where k_proj, q_proj, v_proj are one layer",
        megatron(tp=2),
        change={"lora": LoraSpec(target_modules=("q_proj", "o_proj"))},
        good_change={"lora": LoraSpec(target_modules=("k_proj", "q_proj", "v_proj"))},
    ),
    Case(
        "lora_layers",
        megatron(tp=2),
        "lora.rank_pattern or alpha_pattern on engine=megatron",
        torch(),
        change={"lora": LoraSpec(alpha_pattern={"q_proj": 4.0})},
        good_change={"lora": LoraSpec(alpha_pattern={"q_proj": 4.0})},
    ),
    Case(
        "fsdp2_offload",
        torch(zero_stage=3, offload_param="cpu"),
        "offload_param=cpu, offload_optimizer=none on engine=torch: FSDP2 offloads both to host memory, or none",
        ON_HOST,
        change={"lora": LoraSpec()},
        good_change={"lora": LoraSpec()},
    ),
    Case(
        "fsdp2_offload",
        dataclasses.replace(ON_HOST, zero_stage=2),
        "zero_stage=2, tp=1; use zero_stage=3 and tp=1",
        ON_HOST,
        change={"lora": LoraSpec()},
        good_change={"lora": LoraSpec()},
    ),
    Case(
        "host_memory_while_loading",
        torch(zero_stage=3, tp=2),
        "loading llama-3.1-405b with lora and tp=2 on engine=torch needs [0-9]+ GiB of host memory a node",
        torch(zero_stage=3),
        model="llama-3.1-405b",
        change={"lora": LoraSpec()},
        good_change={"lora": LoraSpec()},
    ),
]

"""Every rule: a layout that breaks it and the same layout mended (``rule_cases``, a file for each engine)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from kit.planner.rules import is_legal, violations
from kit.planner.rules.rule import REGISTERED
from kit.specs.job import BalancingSpec, GrpoSpec, LoraSpec, OptimizerSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.planning.rule_cases import Case, of_deepspeed, of_megatron, of_torch, of_trl, settled
from tests.planning.shapes import DENSE, EXPERTS, GEMMA, GPT, LATENT, MISTRAL, MIXED, NODES, STACKS, work
from tests.support.models import cluster, deepspeed, megatron, torch

CASES = [*of_torch.CASES, *of_deepspeed.CASES, *of_megatron.CASES, *of_trl.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.bad.engine}")
def test_a_broken_rule_is_named_alone_and_the_mended_layout_is_legal(case: Case) -> None:
    found = violations(settled(case, good=False))
    assert [violation.rule for violation in found] == [case.rule]
    assert re.search(case.said, found[0].message), found[0].message
    assert "\n" not in found[0].message
    assert violations(settled(case, good=True)) == ()
    assert is_legal(settled(case, good=True))


def test_the_example_of_the_design() -> None:
    """tp=6 breaks four rules at once, and each says what it would take."""
    found = {each.rule: each.message for each in violations(settled(Case("", megatron(tp=6), "", megatron()), False))}
    assert found.keys() == {"world_size", "tp_divides_heads", "tp_fits_kv_heads", "tp_divides_mlp"}
    assert "tp=6 does not divide num_attention_heads=32 of llama-3.1-8b; use 1, 2, 4 or 8" in found["tp_divides_heads"]


@pytest.mark.parametrize(("tp", "model", "gpus"), [(8, "llama-3-70b", "16xH100"), (4, "qwen2.5-3b", "8xH100")])
def test_key_value_heads_may_be_fewer_than_ranks(tp: int, model: str, gpus: str) -> None:
    """megatron-core shares them (attention.py); only a mixture of both is refused."""
    assert violations(settled(Case("", megatron(tp=tp), "", megatron(), model=model, gpus=gpus), good=False)) == ()


def test_every_rule_has_a_case() -> None:
    assert set().union(*REGISTERED.values()) == {case.rule for case in CASES} | {rule for rule, _ in EDGES}


HF, TE = torch(dp=8), {"implementation": "transformer_engine"}
FSDP, Z2, Z3 = torch(dp=8, zero_stage=3), deepspeed(dp=8, zero_stage=2), deepspeed(dp=8, zero_stage=3)
OVER = dataclasses.replace(deepspeed(zero_stage=3, tp=2, dp=4), implementation="local")
A2A, RING = {"cp": 2, "cp_comm_type": "a2a"}, {"cp": 2, "cp_comm_type": "p2p"}
CPU, A100, ROCM = (cluster(f"8x{name}") for name in ("cpu", "A100-80", "MI300X"))
FP8, FP32, LORA = {"precision": "fp8"}, {"precision": "fp32"}, LoraSpec()
OLMO = dataclasses.replace(DENSE, family="olmo2", hidden_size=480)
MINISTRAL = dataclasses.replace(DENSE, family="ministral3", rope_scaling={
    "rope_type": "yarn", "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1})  # fmt: skip
SOFTMAX = dataclasses.replace(EXPERTS, family="mixtral", num_shared_experts=0, first_dense_layers=0)
OSS = dataclasses.replace(SOFTMAX, family="gpt_oss", sliding_window=512)
GROUPS = dataclasses.replace(EXPERTS, router_groups=4, router_top_groups=2, experts_per_token=4)
ONE_EXPERT = dataclasses.replace(EXPERTS, num_experts=1, experts_per_token=1)
SGD, EIGHT, MUON, LION = ({"optimizer": OptimizerSpec(name=name)} for name in ("sgd", "adamw-8bit", "muon", "lion"))


def scaled(**scaling: Any) -> ModelSpec:
    return dataclasses.replace(DENSE, rope_scaling=scaling)


def balanced(**how: Any) -> dict[str, Any]:
    return {"balancing": BalancingSpec(**how)}


EDGES: list[tuple[str, list[tuple[Layout, ModelSpec, dict[str, Any], bool]]]] = [
    ("positions", [(HF, GPT, {}, False), (HF, GPT, {"seq_length": 1025}, True), (HF, DENSE, {"seq_length": 9999},
        False)]),
    ("objective_of_stacks", [(HF, STACKS, {}, True), (HF, STACKS, {"objective": "seq2seq"}, False), (HF, DENSE,
        {"objective": "seq2seq"}, True)]),
    ("selective_recompute", [(HF.but(recompute="selective"), DENSE, {}, False), (megatron(recompute="selective"), DENSE,
        {}, False), (OVER.but(recompute="selective"), DENSE, {}, True),
                             (HF.but(recompute="selective"), STACKS, {}, True),
                             (HF.but(recompute="selective"), LATENT, {}, True),
                             (HF.but(recompute="selective"), DENSE, FP8, True)]),
    ("fp8_units", [(HF, DENSE, FP8, False), (HF, DENSE, {**FP8, "machines": A100}, True), (HF, DENSE, {**FP8,
        "machines": CPU}, False),
                   (HF, DENSE, {"machines": A100}, False)]),
    ("precision", [(OVER, DENSE, {"precision": "fp16"}, True), (Z2, DENSE, {"precision": "fp16"}, False), (Z2, DENSE,
        FP8, True)]),
    ("objective", [(megatron(), DENSE, {"objective": "sft"}, False), (megatron(**TE), DENSE, {"objective": "sft"},
        True),
                   (FSDP.but(**A2A), DENSE, {"objective": "sft"}, False),
                   (FSDP.but(**A2A), DENSE, {"objective": "dpo"}, True), (FSDP.but(tp=2), DENSE, {"objective": "sft"},
                   True),
                   (FSDP, DENSE, {"objective": "dpo"}, False), (OVER, DENSE, {"objective": "sft"}, True)]),
    ("expert_load_of_experts", [(megatron(), EXPERTS, {"expert_load": 2.0}, False), (megatron(), DENSE,
        {"expert_load": 2.0}, True)]),
    ("balancing", [(megatron(), EXPERTS, balanced(), False), (megatron(), DENSE, balanced(), True), (megatron(),
        EXPERTS, {**balanced(), "lora": LORA}, True),
                   (megatron(), EXPERTS, {**balanced(), "objective": "sft"}, True), (megatron(), SOFTMAX,
                   balanced(moe_router_bias_update_rate=0.1), True),
                   (megatron(), EXPERTS, balanced(moe_router_bias_update_rate=0.1), False),
                   (HF, EXPERTS, balanced(moe_expert_capacity_factor=1.5), True), (megatron(), EXPERTS,
                   balanced(moe_expert_capacity_factor=1.5), False)]),
    ("multi_token_prediction", [(megatron(), LATENT, {"mtp_num_layers": 2}, False), (FSDP, LATENT,
        {"mtp_num_layers": 1}, True),
                                (megatron(), LATENT, {"mtp_num_layers": 1, "objective": "sft"}, True), (megatron(),
                                LATENT, {"mtp_num_layers": 1, "lora": LORA}, True),
                                (megatron(), dataclasses.replace(LATENT, tied_embeddings=True), {"mtp_num_layers": 1},
                                True)]),
    ("compression_has_a_hook", [(HF.but(gradient_compression="bf16"), DENSE, {}, False),
        (FSDP.but(gradient_compression="bf16"), DENSE, {}, True),
                                (Z2.but(gradient_compression="bf16"), DENSE, {}, False),
                                (Z2.but(gradient_compression="powersgd"), DENSE, {}, True)]),
    ("compression_needs_ranks", [(torch(gradient_compression="bf16"), DENSE, {}, True),
        (HF.but(gradient_compression="bf16"), DENSE, {}, False),
                                 (torch(gradient_compression="bf16", zero_stage=3), DENSE, {}, False)]),
    ("compression_needs_fp32", [(Z2.but(gradient_compression="bf16"), DENSE, FP32, False),
        (Z2.but(gradient_compression="bf16"), DENSE, {}, True)]),
    ("zeropp_needs_zero_3", [(Z2.but(zero_hpz=8), DENSE, {}, True), (Z3.but(zero_hpz=8), DENSE, {}, False), (Z2, DENSE,
        {}, False),
                             (Z2.but(zero_quantized_weights=True), DENSE, {}, True),
                             (Z2.but(zero_quantized_gradients=True), DENSE, {}, True)]),
    ("zeropp_kernels", [(Z3.but(zero_quantized_gradients=True), DENSE, {"machines": CPU}, True),
        (Z3.but(zero_quantized_gradients=True), DENSE, {}, False),
                        (Z3.but(zero_hpz=8), DENSE, {"machines": CPU}, False)]),
    ("zeropp_precision", [(Z3.but(zero_quantized_weights=True), DENSE, FP32, True),
        (Z3.but(zero_quantized_weights=True), DENSE, {}, False), (Z3, DENSE, FP32, False)]),
    ("zeropp_groups", [(Z3.but(zero_hpz=2, tp=2), DENSE, {}, True), (Z3.but(zero_hpz=2, cp=2), DENSE, {}, True),
        (Z3.but(tp=2), DENSE, {}, False)]),
    ("hpz_divides_ranks", [(Z3.but(zero_hpz=3), DENSE, {}, True), (Z3.but(zero_hpz=8, dp=4), DENSE, {}, True),
        (Z3.but(zero_hpz=4), DENSE, {}, False),
                           (Z2.but(zero_hpz=3), DENSE, {}, False), (Z3.but(zero_hpz=16, dp=16), DENSE, {}, True)]),
    ("hpz_without_offload", [(Z3.but(zero_hpz=8, offload_param="cpu"), DENSE, {}, True), (Z3.but(offload_param="cpu"),
        DENSE, {}, False),
                             (Z3.but(zero_hpz=8), DENSE, {}, False), (Z2.but(zero_hpz=8, offload_param="cpu"), DENSE,
                             {}, False)]),
    ("quantized_gradients_need_nodes", [(Z3.but(zero_quantized_gradients=True), DENSE, {}, True),
        (Z3.but(zero_quantized_gradients=True), DENSE, {"machines": NODES}, False)]),
    ("cp_comm_type", [(megatron(**A2A), DENSE, {}, True), (megatron(**RING), DENSE, {}, False), (FSDP.but(cp=2), DENSE,
        {}, True), (FSDP, DENSE, {}, False),
                      (Z3.but(**RING), DENSE, {}, True), (Z3.but(cp_comm_type="p2p"), DENSE, {}, True)]),
    ("tp_or_cp", [(FSDP.but(tp=2, **RING), DENSE, {}, True), (FSDP.but(**RING), DENSE, {}, False), (FSDP.but(tp=2),
        DENSE, {}, False)]),
    ("torch_cp_needs_fsdp2", [(HF.but(**RING), DENSE, {}, True), (FSDP.but(**RING), DENSE, {}, False), (HF, DENSE, {},
        False)]),
    ("torch_cp_family", [(FSDP.but(**RING), MIXED, {}, True), (FSDP, MIXED, {}, False)]),
    ("torch_cp_precision", [(FSDP.but(**RING), DENSE, FP8, True), (FSDP, DENSE, FP8, False), (FSDP.but(**RING), DENSE,
        {}, False)]),
    ("cp_needs_fused_attention", [(FSDP.but(**A2A), GEMMA, {}, True), (FSDP, GEMMA, {}, False), (FSDP.but(**A2A), DENSE,
        {}, False)]),
    ("cp_without_window", [(FSDP.but(**A2A), MISTRAL, {}, True), (FSDP.but(**A2A), MISTRAL, {"seq_length": 256}, False),
        (FSDP, MISTRAL, {}, False)]),
    ("ulysses_family", [(Z3.but(**A2A), GPT, {}, True), (Z3, GPT, {}, False), (Z3.but(**A2A), DENSE, {}, False)]),
    ("ulysses_divides_heads", [(Z3.but(cp=5, cp_comm_type="a2a"), DENSE, {}, True), (Z3.but(cp=6, cp_comm_type="a2a"),
        DENSE, {}, False),
                               (FSDP.but(cp=5, cp_comm_type="p2p"), DENSE, {}, False)]),
    ("ulysses_fits_kv_heads", [(Z3.but(**A2A), DENSE, {}, True), (Z3.but(cp=6, cp_comm_type="a2a"), DENSE, {}, False),
        (Z3.but(cp=3, cp_comm_type="a2a"), DENSE, {}, False),
                               (FSDP.but(**RING), DENSE, {}, False)]),
    ("ulysses_divides_sequence", [(Z3.but(cp=3, cp_comm_type="a2a"), DENSE, {}, True), (Z3.but(**A2A), DENSE, {},
        False), (FSDP.but(cp=3, cp_comm_type="p2p"), DENSE, {}, False)]),
    ("context_parallel", [(megatron(cp=2), DENSE, {"seq_length": 1026}, True), (megatron(cp=2), DENSE,
        {"seq_length": 1028}, False),
                          (megatron(), DENSE, {"seq_length": 1025}, False), (FSDP.but(**A2A), DENSE,
                          {"seq_length": 1026}, False)]),
    ("ring_without_mla", [(megatron(**RING), LATENT, {}, True), (megatron(cp=2), LATENT, {}, False),
        (megatron(cp_comm_type="p2p"), LATENT, {}, False)]),
    ("ring_needs_fused_attention", [(megatron(**RING), OSS, {}, True), (megatron(**RING), GEMMA, {}, True),
        (megatron(cp=2), OSS, {}, False),
                                    (megatron(**RING), DENSE, {}, False), (megatron(**RING), dataclasses.replace(GEMMA,
                                    family="gemma3_text"), {}, True)]),
    ("ring_without_window", [(megatron(**RING), MISTRAL, {}, True), (megatron(**RING), MISTRAL, {"seq_length": 256},
        False), (megatron(cp=2), MISTRAL, {}, False)]),
    ("ring_needs_16_bits", [(FSDP.but(**RING), DENSE, FP32, True), (FSDP.but(**RING), DENSE, {**FP32, "machines": CPU},
        False), (FSDP.but(**RING), DENSE, {}, False),
                            (FSDP.but(**A2A), DENSE, FP32, False), (FSDP.but(cp_comm_type="p2p"), DENSE, FP32, False)]),
    ("ring_kernel", [(FSDP.but(**RING, attention_kernel="cudnn"), DENSE, {}, True), (FSDP.but(**A2A,
        attention_kernel="cudnn"), DENSE, {}, False), (FSDP.but(**RING), DENSE, {}, False)]),
    ("autocast_needs_zero", [(deepspeed(autocast=True), DENSE, {}, True), (OVER.but(autocast=True), DENSE, {}, True),
        (Z2.but(autocast=True), DENSE, {}, False)]),
    ("autocast_precision", [(Z2.but(autocast=True), DENSE, FP32, True), (Z2.but(autocast=True), DENSE, {}, False), (Z2,
        DENSE, FP32, False)]),
    ("autocast_quantized_weights", [(Z3.but(autocast=True, zero_quantized_weights=True), DENSE, {}, True),
        (Z3.but(autocast=True), DENSE, {}, False)]),
    ("sp_needs_megatron_layers", [(Z3.but(sp=True), DENSE, {}, True), (OVER.but(sp=True), DENSE, {}, False)]),
    ("megatron_layers_need_tp", [(OVER.but(tp=1), DENSE, {}, True), (OVER, DENSE, {}, False), (Z3, DENSE, {}, False)]),
    ("tp_without_experts", [(Z3.but(tp=2), EXPERTS, {}, True), (Z3, EXPERTS, {}, False), (Z3.but(tp=2), DENSE, {},
        False)]),
    ("tp_without_nvme", [(Z3.but(tp=3, offload_param="nvme"), DENSE, {}, True), (Z3.but(tp=3, offload_param="cpu"),
        DENSE, {}, False), (Z3.but(offload_param="nvme"), DENSE, {}, False)]),
    ("autotp_family", [(Z3.but(tp=2), GPT, {}, True), (Z3, GPT, {}, False), (OVER, GPT, {}, False), (Z3.but(tp=2),
        DENSE, {}, False), (Z3.but(tp=2), EXPERTS, {}, False)]),
    ("autotp_divides_kv_heads", [(Z3.but(tp=2), DENSE, {}, True), (Z3.but(tp=3), DENSE, {}, False), (Z3.but(tp=6),
        DENSE, {}, True), (OVER.but(tp=6), DENSE, {}, False)]),
    ("offload_param_needs_zero_3", [(Z2.but(offload_param="cpu"), DENSE, {}, True), (Z3.but(offload_param="cpu"), DENSE,
        {}, False), (Z2, DENSE, {}, False)]),
    ("offload_optimizer_needs_zero", [(deepspeed(offload_optimizer="cpu"), DENSE, {}, True),
        (Z2.but(offload_optimizer="cpu"), DENSE, {}, False)]),
    ("optimizer_buffers_suffice", [(Z3.but(optimizer_buffer_count=3), DENSE, {}, True),
        (Z3.but(optimizer_buffer_count=4), DENSE, {}, False)]),
    ("param_buffer_holds_a_weight", [(Z3.but(param_buffer_size=200_119), DENSE, {}, True),
        (Z3.but(param_buffer_size=200_120), DENSE, {}, False)]),
    ("size_is_read", [(Z2.but(sub_group_size=9), DENSE, {}, True), (Z3.but(sub_group_size=9), DENSE, {}, False),
        (Z2.but(reduce_bucket_size=9), DENSE, {}, False),
                      (Z3.but(param_buffer_count=9), DENSE, {}, True)]),
    ("fast_path_family", [(FSDP.but(chunked_loss=True), MIXED, {}, True), (FSDP.but(compile_layers=True), MIXED, {},
        True), (FSDP, MIXED, {}, False), (FSDP.but(chunked_loss=True), DENSE, {}, False)]),
    ("offloads_layer_inputs", [(FSDP.but(activation_offloading=True), DENSE, {}, True),
        (FSDP.but(activation_offloading=True, recompute="full"), DENSE, {}, False)]),
    ("offloads_of_eager_layers", [(OVER.but(activation_offloading=True), DENSE, {}, True),
        (FSDP.but(activation_offloading=True, compile_layers=True), DENSE, {}, True),
                                  (FSDP.but(activation_offloading=True), DENSE, {}, False),
                                  (FSDP.but(compile_layers=True), DENSE, {}, False)]),
    ("tiled_mlp_dense", [(FSDP.but(tiled_mlp=True), each, {}, each is not DENSE) for each in (
        DENSE, EXPERTS, STACKS, MIXED, dataclasses.replace(GPT, family="opt"))] + [(FSDP, EXPERTS, {}, False)]),
    ("tiled_mlp_alone", [(FSDP.but(tiled_mlp=True), DENSE, {}, False), (FSDP.but(tiled_mlp=True, tp=2), DENSE, {},
        True), (FSDP.but(tiled_mlp=True, compile_layers=True), DENSE, {}, True),
                         (FSDP.but(tiled_mlp=True), DENSE, FP8, True), (FSDP.but(tiled_mlp=True), DENSE, {"lora": LORA},
                         True), (OVER.but(tiled_mlp=True, tp=1), DENSE, {}, True),
                         (FSDP.but(tp=2), DENSE, FP8, False)]),
    ("chunked_loss_whole_head", [(FSDP.but(chunked_loss=True, tp=2), DENSE, {}, True), (OVER.but(chunked_loss=True),
        DENSE, {}, False), (FSDP.but(chunked_loss=True), DENSE, {}, False)]),
    ("chunked_loss_decoder", [(FSDP.but(chunked_loss=True), STACKS, {}, True), (FSDP, STACKS, {}, False)]),
    ("chunked_loss_fp16", [(Z2.but(chunked_loss=True), DENSE, {"precision": "fp16"}, True), (Z2.but(chunked_loss=True),
        DENSE, {}, False), (Z2, DENSE, {"precision": "fp16"}, False)]),
    ("compile_huggingface", [(OVER.but(compile_layers=True), DENSE, {}, True), (Z2.but(compile_layers=True), DENSE, {},
        False)]),
    ("compile_below_zero_3", [(Z3.but(compile_layers=True), DENSE, {}, True), (Z2.but(compile_layers=True), DENSE, {},
        False)]),
    ("compile_whole_layers", [(FSDP.but(compile_layers=True, **more), DENSE, job, broken) for more, job, broken in (
        ({"tp": 2}, {}, True), (RING, {}, True), ({}, {"lora": LoraSpec(four_bit=True)}, True), ({}, {"lora": LORA},
        False), ({}, {}, False))]
     + [(OVER.but(compile_layers=True), DENSE, {}, False), (FSDP.but(tp=2), DENSE, {}, False)]),
    ("attention_kernel_generation", [(FSDP.but(attention_kernel="flash3"), DENSE, {}, False),
        (FSDP.but(attention_kernel="flash3"), DENSE, {"machines": A100}, True),
                                     (FSDP.but(attention_kernel="cudnn"), DENSE, {"machines": A100}, False),
                                     (FSDP.but(attention_kernel="flash4"), DENSE, {"machines": ROCM},
                                     False)]),
    ("attention_kernel_rocm", [(FSDP.but(attention_kernel="cudnn"), DENSE, {"machines": ROCM}, True),
        (FSDP.but(attention_kernel="cudnn"), DENSE, {}, False)]),
    ("attention_kernel_bits", [(FSDP.but(attention_kernel="cudnn"), DENSE, FP32, True),
        (FSDP.but(attention_kernel="cudnn"), DENSE, {"machines": CPU}, True),
                               (FSDP.but(attention_kernel="cudnn"), DENSE, {}, False), (FSDP, DENSE, FP32, False)]),
    ("gradient_dtype_needs_fsdp2", [(HF.but(gradient_dtype="bf16"), DENSE, {}, True), (FSDP.but(gradient_dtype="bf16",
        tp=2), DENSE, {}, True),
                                    (FSDP.but(gradient_dtype="bf16", zero_stage=2), DENSE, {}, False), (HF, DENSE, {},
                                    False)]),
    ("gradient_dtype_needs_8bit_adamw", [(FSDP.but(gradient_dtype="bf16"), DENSE, more, broken) for more, broken in (
        (EIGHT, False), ({}, True), ({**EIGHT, **FP32}, True), ({**EIGHT, "lora": LORA}, True))] + [
            (HF.but(gradient_dtype="bf16"), DENSE, {}, False), (FSDP, DENSE, {}, False),
            (FSDP.but(gradient_dtype="bf16", tp=2), DENSE, {}, False)]),
    ("gradient_dtype_without_accumulation", [(FSDP.but(gradient_dtype="bf16", gradient_accumulation_steps=2), DENSE,
        EIGHT, True),
                                             (FSDP.but(gradient_dtype="bf16"), DENSE, EIGHT, False),
                                             (FSDP.but(gradient_accumulation_steps=2), DENSE, EIGHT, False),
                                             (FSDP.but(gradient_dtype="bf16", gradient_accumulation_steps=2), DENSE, {},
                                             False)]),
    ("dora", [(each, model, {"lora": LoraSpec(use_dora=True, **more)}, broken) for each, model, more, broken in (
        (FSDP, DENSE, {}, False), (megatron(), DENSE, {}, True), (Z3, DENSE, {}, True), (Z2, DENSE, {}, False),
        (FSDP.but(tp=2), DENSE, {}, True),
        (FSDP, DENSE, {"four_bit": True}, True), (FSDP, EXPERTS, {}, True))] + [(megatron(), DENSE, {"lora": LORA},
        False)]),
    ("lora", [(each, model, {"lora": LoraSpec(**more)}, broken) for each, model, more, broken in (
        (FSDP, DENSE, {}, False), (Z3.but(offload_param="nvme"), DENSE, {}, True), (FSDP.but(tp=2), DENSE,
        {"dropout": 0.1}, True), (FSDP.but(tp=2), DENSE, {"four_bit": True}, True),
        (FSDP.but(tp=2), DENSE, {}, False), (FSDP, DENSE, {"dropout": 0.1}, False), (megatron(), DENSE, {}, False),
        (megatron(**TE), DENSE, {}, True), (OVER, DENSE, {}, True),
        (megatron(), DENSE, {"four_bit": True}, True), (megatron(), DENSE, {"dropout": 0.1}, True), (megatron(),
        EXPERTS, {}, True), (megatron(), EXPERTS, {"targets": "attention"}, False),
        (megatron(), EXPERTS, {"target_modules": ("o_proj",)}, False), (megatron(), SOFTMAX, {}, False))]),
    ("lora_layers", [(each, DENSE, {"lora": LoraSpec(**more)}, broken) for each, more, broken in (
        (FSDP, {}, False), (FSDP, {"target_modules": ("q_proj",)}, False), (FSDP, {"target_modules": ("other",)}, True),
        (FSDP, {"rank_pattern": {"other": 2}}, True),
        (FSDP, {"target_modules": ("q_proj",), "alpha_pattern": {"k_proj": 2.0}}, True), (FSDP,
        {"target_modules": ("q_proj",), "alpha_pattern": {"q_proj": 2.0}}, False),
        (megatron(), {"target_modules": ("q_proj",)}, True), (megatron(), {"target_modules": ("q_proj", "k_proj",
        "v_proj")}, False), (megatron(), {"rank_pattern": {"o_proj": 2}}, True),
        (megatron(), {"alpha_pattern": {"o_proj": 2.0}}, True))]),
    ("transformer_engine_family", [(megatron(**TE), GEMMA, {}, True), (megatron(**TE), DENSE, {}, False), (megatron(),
        GEMMA, {}, False)]),
    ("pipeline_divides_layers", [(megatron(pp=4), DENSE, {}, True), (megatron(pp=3), DENSE, {}, False), (megatron(pp=2,
        vp=2), DENSE, {}, True), (megatron(pp=4, first_stage_layers=1), DENSE, {}, False)]),
    ("uneven_stages_need_pipeline", [(megatron(first_stage_layers=2), DENSE, {}, True), (megatron(pp=2,
        first_stage_layers=2), DENSE, {}, False), (megatron(), DENSE, {}, False)]),
    ("uneven_stages_fill_chunks", [(megatron(pp=2, vp=4, first_stage_layers=2), DENSE, {}, True), (megatron(pp=2, vp=4,
        last_stage_layers=3), DENSE, {}, False),
                                   (megatron(pp=2, vp=4, first_stage_layers=4, last_stage_layers=2), DENSE, {}, True),
                                   (megatron(vp=4, first_stage_layers=2), DENSE, {}, False)]),
    ("uneven_stages_add_up", [(megatron(pp=3, first_stage_layers=2), DENSE, {}, False), (megatron(pp=3,
        first_stage_layers=1), DENSE, {}, True), (megatron(pp=2, first_stage_layers=2, last_stage_layers=4), DENSE, {},
        False),
                              (megatron(pp=2, first_stage_layers=2, last_stage_layers=3), DENSE, {}, True),
                              (megatron(pp=3, first_stage_layers=6), DENSE, {}, True), (megatron(first_stage_layers=1),
                              DENSE, {}, False)]),
    ("virtual_stages_need_pipeline", [(megatron(vp=2), DENSE, {}, True), (megatron(vp=2, pp=2), DENSE, {}, False)]),
    ("virtual_stages_group_batches", [(megatron(vp=3, pp=2, gradient_accumulation_steps=3), DENSE, {}, True),
        (megatron(vp=3, pp=2, gradient_accumulation_steps=4), DENSE, {}, False),
                                      (megatron(pp=2, gradient_accumulation_steps=3), DENSE, {}, False)]),
    ("width_norm_splits_key_heads", [(megatron(tp=2), OLMO, {}, True), (megatron(tp=3), OLMO, {}, False), (megatron(),
        OLMO, {}, False), (megatron(tp=2), DENSE, {}, False)]),
    ("queries_are_not_scaled_by_position", [(megatron(), MINISTRAL, {"seq_length": 1025}, True), (megatron(), MINISTRAL,
        {}, False), (megatron(), scaled(
        rope_type="yarn", original_max_position_embeddings=64), {}, False)]),
    ("megatron_rope", [(megatron(), scaled(rope_type=kind), {}, broken) for kind, broken in (("default", False),
        ("linear", False), ("llama3", False), ("yarn", False), ("dynamic", True))] + [
        (megatron(), dataclasses.replace(LATENT, rope_scaling=each), {}, broken) for each, broken in (
            ({"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}, False), ({"rope_type": "yarn", "mscale": 1.0},
            True), ({"rope_type": "yarn", "mscale_all_dim": 1.0}, False))] + [
                (megatron(), dataclasses.replace(DENSE, family="phi3", hidden_size=480, partial_rotary_factor=0.5,
                rope_scaling={"rope_type": "longrope"}), {}, True), (Z3, scaled(rope_type="dynamic"), {}, False)]),
    ("experts_exist", [(megatron(ep=2), DENSE, {}, True), (megatron(etp=2), DENSE, {}, True), (megatron(), DENSE, {},
        False), (megatron(ep=2), EXPERTS, {}, False)]),
    ("etp_without_biases", [(megatron(etp=2), OSS, {}, True), (megatron(ep=2), OSS, {}, False), (megatron(etp=2),
        EXPERTS, {}, False)]),
    ("ep_divides_experts", [(megatron(ep=5), EXPERTS, {}, True), (megatron(ep=4), EXPERTS, {}, False)]),
    ("etp_divides_experts", [(megatron(etp=3), EXPERTS, {}, True), (megatron(etp=8), EXPERTS, {}, False)]),
    ("ep_divides_ranks", [(megatron(dp=8, ep=3), EXPERTS, {}, True), (megatron(dp=2, cp=2, tp=2, ep=4, etp=2), EXPERTS,
        {}, False), (megatron(cp=3, ep=3), EXPERTS, {}, False),
                          (megatron(dp=4, ep=4, etp=2), EXPERTS, {}, True), (megatron(dp=8, ep=3), DENSE, {}, False)]),
    ("router_weights_add_up", [(megatron(), EXPERTS, {}, False), (megatron(), dataclasses.replace(EXPERTS,
        norm_topk_prob=False), {}, True), (megatron(), dataclasses.replace(EXPERTS, experts_per_token=1), {}, True),
                               (megatron(), dataclasses.replace(SOFTMAX, experts_per_token=1), {}, False)]),
    ("router_groups_of_two", [(megatron(), GROUPS, {}, False), (megatron(), dataclasses.replace(GROUPS,
        experts_per_token=3), {}, True), (megatron(), EXPERTS, {}, False)]),
    ("torch_expert_parallel", [(torch(ep=2, zero_stage=stage, **more), EXPERTS, job, broken)
        for stage, more, job, broken in (
        (3, {}, {}, False), (2, {"cp": 2}, {}, False), (3, {"tp": 2}, {}, True), (1, {}, {}, True),
        (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}, {}, True), (3, {}, {"objective": "dpo"}, True),
        (3, {}, {"objective": "sft"}, False))]),
    ("etp_follows_tp", [(megatron(tp=2, etp=2), EXPERTS, {}, False), (megatron(tp=2), EXPERTS, {}, True),
        (megatron(tp=2, ep=2), EXPERTS, {}, False), (megatron(tp=2), DENSE, {}, False),
        (megatron(tp=2), ONE_EXPERT, {}, True)]),
    ("experts_need_sequence_parallel", [(megatron(tp=2), EXPERTS, {}, True), (megatron(tp=2, sp=True), EXPERTS, {},
        False), (megatron(), EXPERTS, {}, False), (megatron(tp=2), DENSE, {}, False),
        (megatron(tp=2), ONE_EXPERT, {}, True)]),
    ("optimizer_on_the_host", [(megatron(**{"offload_optimizer": "cpu", **more}), DENSE, job, broken) for more, job,
        broken in (
        ({}, {}, False), ({"offload_optimizer": "nvme"}, {}, True), ({"zero_stage": 0}, {}, True), ({}, FP32, True),
        ({}, {"lora": LORA}, True),
        ({"offload_optimizer": "none", "optimizer_offload_fraction": 0.5}, {}, True), ({"offload_optimizer": "none"},
        {}, False), ({"optimizer_offload_fraction": 0.5}, {}, False))]),
    ("megatron_family", [(megatron(), dataclasses.replace(DENSE, family="gemma"), {}, True), (Z3,
        dataclasses.replace(DENSE, family="gemma"), {}, False), (OVER, DENSE, {}, False)]),
    ("tp_divides_heads", [(megatron(tp=5), DENSE, {}, True), (Z3.but(tp=5), DENSE, {}, True), (megatron(tp=4), DENSE,
        {}, False)]),
    ("tp_fits_kv_heads", [(megatron(tp=2), DENSE, {}, True), (megatron(tp=6), DENSE, {}, False), (megatron(tp=3), DENSE,
        {}, False), (Z3.but(tp=2), DENSE, {}, False)]),
    ("tp_divides_mlp", [(megatron(tp=5), DENSE, {}, True), (megatron(tp=4), DENSE, {}, False), (megatron(tp=5), SOFTMAX,
        {}, False), (megatron(tp=5), EXPERTS, {}, True)]),
    ("sequence_parallel_needs_tp", [(megatron(sp=True), DENSE, {}, True), (megatron(sp=True, tp=2), DENSE, {}, False),
        (Z3.but(sp=True), DENSE, {}, False)]),
    ("sequence_parallel_divides", [(megatron(sp=True, tp=2, cp=2), DENSE, {"seq_length": 1026}, True),
        (megatron(sp=True, tp=2), DENSE, {"seq_length": 1026}, False), (megatron(tp=2), DENSE, {"seq_length": 1025},
        False),
                                   (megatron(sp=True, cp=4), DENSE, {"seq_length": 1026}, False), (Z3.but(sp=True,
                                   tp=2), DENSE, {"seq_length": 1025}, False)]),
    ("bf16_state", [(megatron(**TE, optimizer_state_dtype="bf16", **more), DENSE, {}, broken) for more, broken in (
        ({}, False), ({"offload_optimizer": "cpu"}, True), ({"zero_stage": 0},
        True))] + [(megatron(optimizer_state_dtype="bf16"), DENSE, {}, True),
        (deepspeed(zero_stage=1, optimizer_state_dtype="bf16"), DENSE, {}, False), (deepspeed(zero_stage=1,
        optimizer_state_dtype="bf16", gradient_accumulation_steps=2, offload_optimizer="cpu"), DENSE, {}, False)]),
    ("offload_needs_adam", [(Z2.but(offload_optimizer="cpu"), DENSE, SGD, True), (Z2, DENSE, SGD, False),
        (Z2.but(offload_optimizer="cpu"), DENSE, {}, False)]),
    ("adafactor_needs_whole_matrices", [(each, DENSE, {"optimizer": OptimizerSpec(name="adafactor")}, broken) for each,
        broken in ((Z2, True), (deepspeed(tp=3), True), (deepspeed(), False))] + [(Z2, DENSE, {}, False)]),
    ("fused_lion_needs_cuda", [(Z2, DENSE, {**LION, "machines": CPU}, True), (Z2, DENSE, LION, False), (Z2, DENSE,
        {"machines": CPU}, False)]),
    ("distributed_optimizer_needs_adam", [(megatron(), DENSE, SGD, True), (megatron(), DENSE, MUON, True),
        (megatron(zero_stage=0), DENSE, SGD, False), (megatron(), DENSE, {}, False)]),
    ("muon_needs_whole_heads", [(megatron(tp=2), DENSE, MUON, True), (megatron(tp=3), DENSE, MUON, False),
        (megatron(tp=2), DENSE, {}, False)]),
    ("muon_needs_matrices", [(FSDP, EXPERTS, MUON, True), (FSDP, DENSE, MUON, False), (FSDP, EXPERTS, {}, False)]),
    ("torch_tp_family", [(FSDP.but(tp=2), GPT, {}, True), (FSDP, GPT, {}, False), (FSDP.but(tp=2), DENSE, {}, False)]),
    ("fsdp2_offload", [(each.but(offload_param=param, offload_optimizer=place), DENSE, {"lora": lora}, broken) for each,
        param, place, lora, broken in (
        (FSDP, "cpu", "cpu", LORA, False), (FSDP, "cpu", "none", LORA, True), (FSDP, "cpu", "cpu", None, False), (HF,
        "cpu", "cpu", LORA, True), (FSDP.but(tp=3), "cpu", "cpu", LORA, True),
        (FSDP, "none", "none", None, False), (FSDP.but(ep=2), "cpu", "cpu", None, True))]),
    ("torch_tp_needs_fsdp2", [(HF.but(tp=3), DENSE, {}, True), (FSDP.but(tp=3), DENSE, {}, False), (HF, DENSE, {},
        False)]),
    ("torch_tp_divides", [(FSDP.but(tp=2), DENSE, {}, True), (FSDP.but(tp=3), DENSE, {}, True), (FSDP.but(tp=3),
        dataclasses.replace(DENSE, ffn_hidden_size=900), {}, False), (FSDP, DENSE, {}, False)]),
    ("fp8_linear_layers", [(HF, GPT, FP8, True), (HF, GPT, {}, False), (HF, DENSE, FP8, False)]),
    ("fp8_whole_decoders", [(FSDP, STACKS, FP8, True), (FSDP, DENSE, {**FP8, "lora": LORA}, True), (FSDP.but(tp=3),
        DENSE, FP8, True), (FSDP, DENSE, FP8, False), (FSDP.but(tp=3), DENSE, {}, False)]),
    ("fp8_hidden_size", [(FSDP, dataclasses.replace(DENSE, hidden_size=328), FP8, True), (FSDP, DENSE, FP8, False),
        (FSDP, dataclasses.replace(DENSE, hidden_size=328), {}, False)]),
    ("fp8_tokens", [(FSDP, DENSE, {**FP8, "seq_length": 1016}, True), (FSDP.but(micro_batch_size=2), DENSE, {**FP8,
        "seq_length": 1016}, False), (FSDP, DENSE, {**FP8, "seq_length": 1016, "objective": "sft"}, False),
                    (FSDP, DENSE, {"seq_length": 1016}, False)]),
    ("trl_has_its_own_loop", [(FSDP.but(**{name: value}), DENSE, {"objective": "dpo"}, True) for name, value in (
        ("chunked_loss", True), ("tiled_mlp", True), ("compile_layers", True), ("activation_offloading", True),
        ("gradient_compression", "bf16"))] + [
            (FSDP, DENSE, {"objective": "dpo"}, False), (FSDP.but(chunked_loss=True), DENSE, {}, False),
            (HF.but(gradient_compression="bf16"), DENSE, {}, False)]),
    ("trl_precision_and_optimizer", [(FSDP, DENSE, {"objective": "dpo", **more}, broken) for more, broken in (({},
        False), (FP8, True), (SGD, True))] + [(FSDP, DENSE, FP8, False), (FSDP, DENSE, SGD, False)]),
    ("kto_needs_two_rows", [(FSDP.but(micro_batch_size=2), DENSE, {"objective": "kto"}, False),
        (FSDP.but(micro_batch_size=2), DENSE, {}, False)]),
    ("grpo", [(FSDP, DENSE, {"objective": "grpo", "grpo": GrpoSpec(**more), "machines": machines}, broken) for more,
        machines, broken in (
        ({}, NODES, False), ({"num_generations": 3}, NODES, True), ({"max_completion_length": 1024}, NODES, True),
        ({"max_completion_length": 1023}, NODES, False),
        ({"vllm_gpu_memory_utilization": 0.3}, CPU, True), ({"vllm_gpu_memory_utilization": 0.3}, NODES, False), ({},
        CPU, False))] + [(FSDP, DENSE, {"grpo": GrpoSpec()}, True), (FSDP, DENSE, {}, False)]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "pairs"), EDGES, ids=[rule for rule, _ in EDGES])
def test_a_rule_ends_where_it_says(rule: str, pairs: list[tuple[Layout, ModelSpec, dict[str, Any], bool]]) -> None:
    """Each condition by two workloads that differ in nothing else."""
    for layout, model, more, broken in pairs:
        found = {violation.rule for violation in violations(work(layout, model, **more))}
        assert (rule in found) == broken, (layout, model.name, more)

"""megatron.yaml and pretrain_gpt.sh, key by key and flag by flag: the value by hand, from the model, the layout and
megatron-core's meaning of the argument,
and both sides of each branch. megatron-core's own classes read megatron.yaml in
tests/megatron, Megatron-LM's recorded parser the flags."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.addons.targets.pretrain_gpt import pretrain_gpt_script, refusing_stream, why_not, with_blend
from kit.specs.catalog import load_model
from kit.specs.job import BalancingSpec, OptimizerSpec
from tests.emit.plans import ADAM, DENSE, MEGATRON, ZERO2, check_settings, plan_of, stand_in, words

M, T, D, OPT = "model.", "transformer_config.", "distributed_data_parallel.", "optimizer."
PARALLEL = {
    "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 1,
}  # fmt: skip
MEGATRONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # 128,257 = 4 x 32,064.25: rows for four ranks
    "tp4-pp2": (
        DENSE | {"model": replace(load_model("llama-3.1-8b"), vocab_size=128_257), "cluster": "16xH100",
                 "job": {"optimizer": ADAM, "learning_rate": 1e-4, "grad_clip": 0.5, "seq_length": 2048}},
        {"only": True, **{f"parallel_state.{key}": value for key, value in PARALLEL.items()},
         **{T + key: value for key, value in PARALLEL.items()}, T + "num_layers": 32, T + "hidden_size": 4096,
         T + "ffn_hidden_size": 14336, T + "num_attention_heads": 32, T + "num_query_groups": 8, T + "kv_channels": 128,
         T + "normalization": "RMSNorm", T + "layernorm_epsilon": 1e-5, T + "activation_func": "silu",
         T + "gated_linear_unit": True, T + "add_bias_linear": False, T + "add_qkv_bias": False,
         T + "qk_layernorm": False, T + "hidden_dropout": 0.0, T + "attention_dropout": 0.0,
         T + "gradient_accumulation_fusion": True, T + "calculate_per_token_loss": True, T + "bf16": True,
         T + "params_dtype": "bfloat16", T + "sequence_parallel": True, T + "pipeline_dtype": "bfloat16",
         T + "deallocate_pipeline_outputs": True, M + "vocab_size": 128_260, M + "max_sequence_length": 2048,
         M + "share_embeddings_and_output_weights": False, M + "position_embedding_type": "rope",
         D + "grad_reduce_in_fp32": True, D + "overlap_grad_reduce": True, D + "use_distributed_optimizer": True,
         OPT + "optimizer": "adam", OPT + "lr": 1e-4, OPT + "adam_beta1": 0.8, OPT + "adam_beta2": 0.97,
         OPT + "adam_eps": 1e-7,
         OPT + "weight_decay": 0.03, OPT + "clip_grad": 0.5, OPT + "bf16": True, OPT + "params_dtype": "bfloat16",
         OPT + "use_distributed_optimizer": True},
    ),
    "one rank in fp32": (
        MEGATRON | {"implementation": "local", "cluster": "1xH100", "zero_stage": 1, "model": "gpt2-xl",
                    "job": {"precision": "fp32", "seq_length": 512}},
        {D + "overlap_grad_reduce": False, D + "use_distributed_optimizer": False, T + "bf16": False,
         OPT + "bf16": False,
         T + "params_dtype": "float32", OPT + "params_dtype": "float32", T + "pipeline_dtype": ...,
         T + "deallocate_pipeline_outputs": ..., T + "gradient_accumulation_fusion": False,
         T + "normalization": "LayerNorm", T + "add_bias_linear": True, T + "gated_linear_unit": False,
         M + "max_sequence_length": 1024, M + "share_embeddings_and_output_weights": True,
         M + "position_embedding_type": "learned_absolute", T + "sequence_parallel": False,
         T + "recompute_granularity": ..., T + "cp_comm_type": ..., T + "window_size": ..., T + "softmax_scale": ...,
         T + "num_moe_experts": ..., T + "no_rope_freq": ..., T + "mtp_num_layers": ..., T + "fp8": ...,
         T + "layernorm_zero_centered_gamma": ..., T + "overlap_p2p_comm": ..., OPT + "optimizer_cpu_offload": ...,
         "parallel_state.expert_model_parallel_size": ..., "parallel_state.virtual_pipeline_model_parallel_size": ...},
    ),
    # a distributed optimizer even on one rank: it is what is offloaded
    "host": (
        MEGATRON | {"zero_stage": 1, "offload_optimizer": "cpu", "optimizer_offload_fraction": 0.4,
        "cluster": "1xH100"},
        {D + "use_distributed_optimizer": True, OPT + "optimizer_cpu_offload": True,
         OPT + "optimizer_offload_fraction": 0.4, OPT + "overlap_cpu_optimizer_d2h_h2d": True,
         OPT + "use_precision_aware_optimizer": True, OPT + "exp_avg_dtype": ..., D + "overlap_grad_reduce": False},
    ),
    "zero0": (DENSE | {"zero_stage": 0}, {OPT + "use_distributed_optimizer": False, D + "overlap_grad_reduce": True}),
    "cp alone": (
        MEGATRON | {"cp": 8, "cp_comm_type": "p2p", "zero_stage": 1, "recompute": "full"},
        {D + "overlap_grad_reduce": True, D + "use_distributed_optimizer": True, T + "cp_comm_type": "p2p",
         T + "context_parallel_size": 8, "parallel_state.context_parallel_size": 8, T + "recompute_granularity": "full",
         T + "recompute_method": "uniform", T + "recompute_num_layers": 1, T + "recompute_modules": ...},
    ),
    "cp of two": (MEGATRON | {"cp": 2, "dp": 4, "cp_comm_type": "p2p"}, {T + "cp_comm_type": "p2p"}),
    "selective": (
        DENSE | {"recompute": "selective"},
        {T + "recompute_granularity": "selective", T + "recompute_modules": ["core_attn"], T + "recompute_method": ...,
         T + "recompute_num_layers": ...},
    ),
    "selective modules": (
        DENSE | {"recompute": "selective", "recompute_modules": ("mlp", "core_attn")},
        {T + "recompute_granularity": "selective", T + "recompute_modules": ["mlp", "core_attn"]},
    ),
    "bf16 gradients": (
        DENSE | {"gradient_dtype": "bf16"}, {D + "grad_reduce_in_fp32": False, OPT + "main_grads_dtype": ...}
    ),
    "bf16 gradients and states": (
        DENSE | {"gradient_dtype": "bf16", "optimizer_state_dtype": "bf16"},
        {D + "grad_reduce_in_fp32": False, OPT + "main_grads_dtype": "bf16", OPT + "exp_avg_dtype": "bf16"},
    ),
    "fp8 weights": (
        DENSE | {"implementation": "transformer_engine", "fp8_param_gather": True, "job": {"precision": "fp8"}},
        {T + "fp8_param": True, D + "fp8_param_gather": True, OPT + "fp8_recipe": "tensorwise",
         T + "fp8_recipe": "tensorwise", D + "reuse_grad_buf_for_mxfp8_param_ag": ...,
         OPT + "reuse_grad_buf_for_mxfp8_param_ag": ..., D + "grad_reduce_in_fp32": True},
    ),
    "fp8 weights in blocks": (
        DENSE | {"implementation": "transformer_engine", "fp8_param_gather": True, "job": {"precision": "fp8"},
        "cluster": "8xB200"},
        {OPT + "fp8_recipe": "mxfp8", D + "reuse_grad_buf_for_mxfp8_param_ag": True,
         OPT + "reuse_grad_buf_for_mxfp8_param_ag": True},
    ),
    "fp8 beside bf16 weights": (
        DENSE | {"implementation": "transformer_engine", "job": {"precision": "fp8"}},
        {T + "fp8_param": ..., D + "fp8_param_gather": ..., OPT + "fp8_recipe": ...},
    ),
    "interleaved": (
        DENSE | {"vp": 4},
        {"parallel_state.virtual_pipeline_model_parallel_size": 4, T + "virtual_pipeline_model_parallel_size": 4,
         T + "overlap_p2p_comm": True, T + "batch_p2p_comm": False, T + "deallocate_pipeline_outputs": ...,
         T + "pipeline_model_parallel_layout": ...},
    ),
    # 32 layers over 4 stages, the first of one layer, 15 and 1 chunk left for the last
    "uneven": (
        DENSE | {"tp": 1, "sp": False, "dp": 4, "pp": 4, "first_stage_layers": 1, "last_stage_layers": 5},
        {T + "pipeline_model_parallel_layout": "Et|t*13|t*13|t*5L"},
    ),
    "uneven first": (
        DENSE | {"pp": 3, "first_stage_layers": 2}, {T + "pipeline_model_parallel_layout": "Et*2|t*15|t*15L"}
    ),
    "uneven last": (
        DENSE | {"pp": 3, "last_stage_layers": 2}, {T + "pipeline_model_parallel_layout": "Et*15|t*15|t*2L"}
    ),
    "bf16 states": (
        DENSE | {"optimizer_state_dtype": "bf16"},
        {OPT + "use_precision_aware_optimizer": True, OPT + "exp_avg_dtype": "bf16", OPT + "exp_avg_sq_dtype": "bf16",
         OPT + "optimizer_cpu_offload": ...},
    ),
    "sgd": (
        DENSE | {"job": {"optimizer": OptimizerSpec(name="sgd", beta1=0.6)}},
        {OPT + "optimizer": "sgd", OPT + "sgd_momentum": 0.6, OPT + "adam_beta1": ...},
    ),
    # arXiv 2502.16982: 0.2 x sqrt(largest side), Nesterov, momentum 0.95
    "muon": (
        DENSE | {"job": {"optimizer": replace(ADAM, name="muon")}},
        {OPT + "optimizer": "muon", OPT + "muon_momentum": 0.95, OPT + "muon_nesterov": True, OPT + "adam_beta1": 0.8,
         OPT + "muon_coefficient_type": "simple", OPT + "muon_scale_mode": "spectral",
         OPT + "muon_extra_scale_factor": 0.2,
         OPT + "muon_fp32_matmul_prec": "medium", OPT + "muon_tp_mode": "duplicated"},
    ),
    "muon in fp32": (
        DENSE | {"job": {"optimizer": replace(ADAM, name="muon"), "precision": "fp32"}},
        {OPT + "muon_fp32_matmul_prec": "highest"},
    ),
    "fp8 of Hopper": (
        DENSE | {"job": {"precision": "fp8"}},
        {T + "fp8": "hybrid", T + "fp8_recipe": "tensorwise", T + "bf16": True, OPT + "bf16": True,
         T + "params_dtype": "bfloat16"},
    ),
    "fp8 of Blackwell": (
        DENSE | {"job": {"precision": "fp8"}, "cluster": "8xB200"}, {T + "fp8": "e4m3", T + "fp8_recipe": "mxfp8"}
    ),
    # Gemma 2: windows of 4,096 tokens, itself among them, in every other layer; scores over sqrt(256)
    "windows": (
        MEGATRON | {"model": "gemma-2-9b", "implementation": "local", "job": {"seq_length": 8192}, "tp": 8},
        {T + "window_size": [4095, 0], T + "window_attn_skip_freq": 2, T + "softmax_scale": 0.0625,
         T + "layernorm_zero_centered_gamma": True, T + "activation_func_clamp_value": ...,
         T + "glu_linear_offset": ...,
         M + "vocab_size": 256_000},
    ),
    "a window that hides nothing": (
        MEGATRON | {"model": "gemma-2-9b", "implementation": "local", "job": {"seq_length": 4096}, "tp": 8},
        {T + "window_size": ..., T + "window_attn_skip_freq": ...},
    ),
    "windows everywhere": (
        MEGATRON | {"model": "mistral-7b-v0.1", "job": {"seq_length": 8192}, "tp": 8},
        {T + "window_size": [4095, 0], T + "window_attn_skip_freq": ...},
    ),
    "every fourth layer without positions": (
        MEGATRON | {"model": "smollm3-3b", "implementation": "local", "tp": 4, "dp": 2},
        {T + "no_rope_freq": [0, 0, 0, 1] * 9},
    ),
    "biases of qkv": (
        MEGATRON | {"model": "qwen2.5-7b", "tp": 4, "dp": 2}, {T + "add_qkv_bias": True, T + "qk_layernorm": False}
    ),
    "norms of heads": (MEGATRON | {"model": "qwen3-0.6b", "dp": 8}, {T + "qk_layernorm": True,
    T + "add_qkv_bias": False}),
    "norms of the width": (
        MEGATRON | {"model": "olmo-2-7b", "implementation": "local", "dp": 8}, {T + "qk_layernorm": False}
    ),
    "clamped": (
        MEGATRON | {"model": "gpt-oss-20b", "implementation": "local", "dp": 8},
        {T + "activation_func_clamp_value": 7.0, T + "glu_linear_offset": 1.0, T + "add_bias_linear": True},
    ),
    "softmax router": (
        MEGATRON | {"model": "mixtral-8x7b", "dp": 4, "tp": 2, "ep": 4, "etp": 1, "zero_stage": 1, "job": {
            "balancing": BalancingSpec(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02)}},
        {T + "num_moe_experts": 8, T + "moe_router_topk": 2, T + "moe_ffn_hidden_size": 14336,
         T + "moe_router_pre_softmax": False, T + "moe_router_load_balancing_type": "aux_loss",
         T + "moe_router_dtype": "fp32", T + "moe_token_dispatcher_type": "alltoall", T + "moe_aux_loss_coeff": 0.02,
         T + "moe_grouped_gemm": True, T + "moe_permute_fusion": True, T + "expert_model_parallel_size": 4,
         T + "expert_tensor_parallel_size": 1, "parallel_state.expert_model_parallel_size": 4,
         "parallel_state.expert_tensor_parallel_size": 1, T + "moe_z_loss_coeff": ...,
         T + "moe_expert_capacity_factor": ..., T + "moe_router_score_function": ...,
         T + "moe_router_enable_expert_bias": ..., T + "moe_router_num_groups": ..., T + "moe_router_group_topk": ...,
         T + "moe_router_topk_scaling_factor": ..., T + "moe_shared_expert_intermediate_size": ...,
         T + "moe_shared_expert_gate": ..., T + "moe_flex_dispatcher_backend": ...,
         T + "moe_shared_expert_overlap": ..., T + "overlap_moe_expert_parallel_comm": ..., T + "moe_layer_freq": ...},
    ),
    # moe/router.py sums the global loss over data-parallel ranks, and gradients are averaged over them once more
    "global loss": (
        MEGATRON | {"model": "qwen3-30b-a3b", "dp": 8, "ep": 8, "job": {"balancing": BalancingSpec(
                        moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.001,
                        moe_z_loss_coeff=0.01, moe_expert_capacity_factor=1.5)}},
        {T + "moe_aux_loss_coeff": 0.008, T + "moe_z_loss_coeff": 0.01, T + "moe_expert_capacity_factor": 1.5},
    ),
    "softmax before the choice": (
        MEGATRON | {"model": replace(load_model("qwen3-30b-a3b"), norm_topk_prob=False), "dp": 8, "etp": 1,
                    "implementation": "local"},
        {T + "moe_router_pre_softmax": True, T + "moe_router_load_balancing_type": "none",
         T + "moe_aux_loss_coeff": ...,
         T + "moe_grouped_gemm": ..., T + "moe_permute_fusion": ...},
    ),
    "shared experts": (
        MEGATRON | {"model": "qwen1.5-moe-a2.7b", "implementation": "local", "dp": 8},
        {T + "moe_shared_expert_intermediate_size": 4 * 1408, T + "moe_shared_expert_gate": True},
    ),
    "sigmoid router": (
        MEGATRON | {"model": replace(load_model("deepseek-v3"), num_layers=6, num_shared_experts=2, router_groups=2,
                                     router_top_groups=1),
                    "dp": 4, "tp": 2, "ep": 4, "etp": 2, "implementation": "local", "job": {
                        "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3, "balancing": BalancingSpec(
                            moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-4,
                            moe_router_bias_update_rate=0.002)}},
        {T + "moe_router_score_function": "sigmoid", T + "moe_router_pre_softmax": False,
         T + "moe_router_enable_expert_bias": True, T + "moe_router_bias_update_rate": 0.002,
         T + "moe_aux_loss_coeff": 1e-4, T + "moe_router_num_groups": 2, T + "moe_router_group_topk": 1,
         T + "moe_router_topk_scaling_factor": 2.5, T + "moe_shared_expert_intermediate_size": 4096,
         T + "moe_layer_freq": [0, 0, 0, 1, 1, 1], T + "expert_tensor_parallel_size": 2, T + "mtp_num_layers": 1,
         T + "mtp_loss_scaling_factor": 0.3, T + "moe_shared_expert_gate": ...},
    ),
    "under deepspeed": (
        ZERO2 | {"dp": 2, "tp": 4, "implementation": "local"},
        {"parallel_state.tensor_model_parallel_size": 4, OPT + "lr": ..., D + "overlap_grad_reduce": ...},
    ),
}  # fmt: skip
PRETRAIN = {
    "tp4-pp2": (
        DENSE | {"cluster": "16xH100", "job": {"optimizer": ADAM, "learning_rate": 1e-4, "grad_clip": 0.5,
                                               "seq_length": 2048}},
        {"nnodes": "2", "nproc-per-node": "8", "node-rank": "1", "seq-length": "2048", "micro-batch-size": "3",
         "global-batch-size": "6", "lr-decay-style": "cosine", "tokenizer-type": "NullTokenizer",
         # the end of a text is one more token of NullTokenizer
         "vocab-size": "128255", "make-vocab-size-divisible-by": "1", "transformer-impl": "transformer_engine",
         "ckpt-format": "torch_dist", "group-query-attention": True, "num-query-groups": "8", "rotary-base": "500000",
         "use-rope-scaling": True, "rope-scaling-factor": "8.0", "swiglu": True, "disable-bias-linear": True,
         "add-qkv-bias": ..., "qk-layernorm": ..., "no-gradient-accumulation-fusion": ...,
         "calculate-per-token-loss": True, "bf16": True, "tensor-model-parallel-size": "4",
         "pipeline-model-parallel-size": "2", "sequence-parallel": True, "untie-embeddings-and-output-weights": True,
         "accumulate-allreduce-grads-in-fp32": True, "overlap-grad-reduce": True, "use-distributed-optimizer": True,
         "optimizer": "adam", "lr": "0.0001", "adam-beta1": "0.8", "adam-beta2": "0.97", "adam-eps": "1e-07",
         "weight-decay": "0.03", "clip-grad": "0.5", "max-position-embeddings": "2048", "norm-epsilon": "1e-05",
         "position-embedding-type": "rope", "num-virtual-stages-per-pipeline-rank": ...},
    ),
    "one head each": (
        MEGATRON | {"model": "gpt2-xl", "dp": 8, "job": {"seq_length": 1024}},
        {"group-query-attention": ..., "num-query-groups": ..., "rotary-base": ..., "use-rope-scaling": ...,
         "rope-scaling-factor": ..., "swiglu": ..., "disable-bias-linear": ..., "standalone": "/M/pretrain_gpt.py",
         "untie-embeddings-and-output-weights": ..., "max-position-embeddings": "1024",
         "position-embedding-type": "learned_absolute", "use-distributed-optimizer": ...},
    ),
    "interleaved": (
        DENSE | {"vp": 4}, {"num-virtual-stages-per-pipeline-rank": "4", "pipeline-model-parallel-layout": ...}
    ),
    "interleaved and uneven": (
        DENSE | {"vp": 2, "first_stage_layers": 2},
        {"num-virtual-stages-per-pipeline-rank": ..., "pipeline-model-parallel-layout": "Et|t*15|t|t*15L"},
    ),
    "windows": (
        MEGATRON | {"model": "mistral-7b-v0.1", "job": {"seq_length": 8192}, "tp": 8, "recompute": "selective"},
        {"window-size": "4095,0", "recompute-modules": "core_attn", "recompute-granularity": "selective"},
    ),
    "short": (
        DENSE | {"implementation": "transformer_engine", "fp8_param_gather": True, "job": {"precision": "fp8"},
        "cluster": "8xB200", "gradient_dtype": "bf16", "recompute": "selective",
        "recompute_modules": ("mlp", "layernorm")},
        {"fp8-param-gather": True, "reuse-grad-buf-for-mxfp8-param-ag": True, "grad-reduce-in-bf16": True,
         "accumulate-allreduce-grads-in-fp32": ..., "fp8-recipe": "mxfp8", "fp8-format": "e4m3"},
    ),
    # that flag would divide the routers' loss by the ranks that share a sequence
    "router losses": (
        MEGATRON | {"model": "mixtral-8x7b", "dp": 4, "tp": 2, "sp": True, "ep": 4, "etp": 1, "job": {
            "balancing": BalancingSpec(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02)}},
        {"calculate-per-token-loss": ..., "num-experts": "8", "moe-router-topk": "2", "expert-model-parallel-size": "4",
         "moe-router-pre-softmax": ..., "moe-grouped-gemm": True, "moe-aux-loss-coeff": "0.02"},
    ),
    "z-loss alone": (
        MEGATRON | {"model": "mixtral-8x7b", "dp": 8, "job": {"balancing": BalancingSpec(moe_z_loss_coeff=0.01)}},
        {"calculate-per-token-loss": ..., "moe-z-loss-coeff": "0.01"},
    ),
    "experts without a loss": (
        MEGATRON | {"model": "mixtral-8x7b", "dp": 8, "job": {"balancing": BalancingSpec()}},
        {"calculate-per-token-loss": True},
    ),
    "norms and biases": (
        MEGATRON | {"model": "qwen2.5-7b", "tp": 4, "dp": 2, "job": {"precision": "fp32"}},
        {"add-qkv-bias": True, "use-rope-scaling": ..., "rotary-base": "1000000", "bf16": ...},
    ),
}  # fmt: skip
TABLES = (
    ("megatron.yaml", "", MEGATRONS),
    ("pretrain_gpt.sh", "", PRETRAIN),
)
CASES = {f"{name}: {case}": (name, target, *both) for name, target, table in TABLES for case, both in table.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_its_value(case: str, tmp_path: Path) -> None:
    check_settings(CASES[case], tmp_path)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GS = (1.0, "gs://b/a")
OF_STORAGE = ["--no-mmap-bin-files", "--object-storage-cache-path", "HERE/indexes"]


@pytest.mark.parametrize(
    ("blend", "data"),
    [
        ([], []),
        ([(0.5, "../a b"), (2.0, "~/$x")], ["--data-path", "0.5", "HERE/../a b", "2.0", "HOME/$x"]),
        ([(1.0, "s3://b/a"), (0.25, "c")], ["--data-path", "1.0", "s3://b/a", "0.25", "HERE/c", *OF_STORAGE]),
        ([(1.0, "gs://b/a"), (0.25, "c")], []),  # which Megatron-LM does not read
    ],
)
def test_a_blend_is_the_data_path(blend: list[tuple[float, str]], data: list[str], tmp_path: Path) -> None:
    text = with_blend(pretrain_gpt_script(plan_of(**DENSE)), blend)
    (tmp_path / "gpt.sh").write_text(text)
    told = words("exec bash ./gpt.sh", tmp_path, HOME="/home/me", MEGATRON_LM="/M")
    found = told[told.index("/M/pretrain_gpt.py") + 1 : told.index("--num-layers")]
    assert found == [word.replace("HERE", str(tmp_path)).replace("HOME", "/home/me") for word in data]
    assert ("# It reads sets on a disk and at s3://, and run.data.blend has gs://b/a: " in text) == (blend[:1] == [GS])


@pytest.mark.parametrize(("given", "code"), [([], 2), (["--data-path", "a"], 0)])
def test_a_run_that_streams_asks_for_a_data_path(given: list[str], code: int, tmp_path: Path) -> None:
    script = refusing_stream(pretrain_gpt_script(plan_of(**DENSE)))
    environment = stand_in(tmp_path, python="#!/bin/sh\nexit 0\n") | {"MEGATRON_LM": "/M"}
    done = subprocess.run(["bash", "-c", script, "x", *given], env=environment, cwd=tmp_path, stderr=-1, text=True)
    assert (done.returncode, "Megatron-LM reads .bin/.idx pairs only" in done.stderr) == (code, code == 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}}, None),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3, "low_freq_factor": 2.0}},
            "no flag for the RoPE",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "it has no flag for the RoPE scaling of this model"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8", **LLAMA3}}, "--rope-scaling-factor is a number"),
        ({"rope_theta": 10_000.5}, "--rotary-base is an integer, and the model has 10000.5"),
    ],
)
def test_a_model_that_megatrons_flags_cannot_say(changes: dict[str, Any], reason: str | None) -> None:
    found = why_not(plan_of(replace(load_model("llama-3.1-8b"), **changes), **DENSE))
    assert (reason or "") in (found or "")
    assert (found is None) == (reason is None)

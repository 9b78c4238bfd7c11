"""``config.json`` of every age and family → the shape, key by key, and refusals by their rule.

What transformers saves reads back in planning/test_huggingface.py; here are files that today's transformers does not
write, and values that must not be lost.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kit.errors import SpecError
from kit.specs import counting
from kit.specs.approximate import approximated
from kit.specs.catalog import load_model
from kit.specs.huggingface import config_from_model, model_from_config, read_config
from kit.specs.model import ModelSpec
from tests.support.files import file_with
from tests.support.refusals import refusal

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 6,
    "num_attention_heads": 6, "vocab_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
FALCON = {**LLAMA, "model_type": "falcon"}
LATENT = {"kv_lora_rank": 5, "qk_nope_head_dim": 11, "qk_rope_head_dim": 4, "v_head_dim": 9}
DEEPSEEK = {**LLAMA, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 30}
V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "n_group": 4, "topk_group": 2}
GRANITE = {**LLAMA, "model_type": "granite", "attention_multiplier": 0.0625}
QWEN_MOE = {**LLAMA, "model_type": "qwen2_moe", "moe_intermediate_size": 100}
MINIMAX = {**LLAMA, "model_type": "minimax_m2", "head_dim": 32}
SMOL = {**LLAMA, "model_type": "smollm3"}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 6}
GPT2 = {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 6, "vocab_size": 128, "n_positions": 64}
T5 = {"model_type": "t5", "num_layers": 5, "num_heads": 6, "d_model": 90, "d_ff": 200, "d_kv": 16, "vocab_size": 128}
BART = {
    "model_type": "bart", "d_model": 96, "vocab_size": 128, "max_position_embeddings": 64, "encoder_layers": 3,
    "decoder_layers": 5, "encoder_ffn_dim": 200, "decoder_ffn_dim": 200, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}

READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "what a silent file means": (
        LLAMA, {"num_key_value_heads": 6, "head_dim": 16, "rope_theta": 10000.0, "rope_scaling": None, "norm_eps": 1e-6,
                "tied_embeddings": False, "activation": None, "partial_rotary_factor": 1.0}
    ),
    "null is silence, but for a window": (
        {**LLAMA, "model_type": "mistral", "rms_norm_eps": None, "head_dim": None, "sliding_window": None,
         "num_key_value_heads": None},
        {"norm_eps": 1e-6, "head_dim": 16, "sliding_window": None, "num_key_value_heads": 6},
    ),
    "mistral's own window": ({**LLAMA, "model_type": "mistral"}, {"sliding_window": 4096}),
    "a family's width of the MLP": (GPT2, {"ffn_hidden_size": 384, "tied_embeddings": True, "rope_theta": None}),
    "gpt2's own": ({**GPT2, "n_inner": 500, "tie_word_embeddings": False}, {"ffn_hidden_size": 500,
        "tied_embeddings": False}),
    "kimi k2": ({**DEEPSEEK, "model_type": "kimi_k2"}, {"family": "deepseek_v3", "head_dim": 15, "router_groups": 8,
                                                        "router_top_groups": 4, "first_dense_layers": 3}),
    "greedy routing has no groups": (V2, {"router_groups": 1, "router_top_groups": 1, "num_key_value_heads": 6}),
    "limited routing has": ({**V2, "topk_method": "group_limited_greedy"}, {"router_groups": 4,
        "router_top_groups": 2}),
    "an activation that is the family's": ({**LLAMA, "hidden_act": "silu"}, {"activation": None}),
    "an activation that is chosen": (
        {**LLAMA, "model_type": "gpt_neox", "hidden_act": "gelu_fast"}, {"activation": "gelu_tanh",
         "partial_rotary_factor": 0.25}
    ),
    "gemma's gelu is the approximation": ({**LLAMA, "model_type": "gemma", "hidden_act": "gelu"}, {"activation": None}),
    "older names": (
        {**{key: value for key, value in FALCON.items() if key != "num_hidden_layers"}, "n_layer": 7}, {"num_layers": 7}
    ),
    "today's name comes first": ({**FALCON, "n_layer": 7}, {"num_layers": 6}),
    # Falcon: one head of keys for all, but with new_decoder_architecture.
    "falcon 7b": (FALCON, {"num_key_value_heads": 1, "shared_norm": True, "biases": None, "positions": None}),
    "falcon of old": ({**FALCON, "multi_query": False, "parallel_attn": False}, {"num_key_value_heads": 6,
        "shared_norm": False}),
    "falcon 40b": (
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3}, {"num_key_value_heads": 3,
         "shared_norm": False}
    ),
    "falcon 11b": (
        {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, {"num_key_value_heads": 6,
         "shared_norm": True}
    ),
    "falcon rw": (
        {**FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        {"positions": "alibi", "biases": "all", "rope_theta": None},
    ),
    "granite": ({**GRANITE, "embedding_multiplier": 12, "logits_scaling": 8}, {
        "query_pre_attn_scalar": 256, "embedding_multiplier": 12.0, "logits_divisor": 8.0, "residual_multiplier": 1.0}),
    "shared experts as wide as several": ({**QWEN_MOE, "shared_expert_intermediate_size": 300},
        {"num_shared_experts": 3}),
    "glm": ({**LLAMA, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 30,
             "attention_bias": True, "use_qk_norm": True}, {"biases": "qkv", "qk_norm": "head",
             "partial_rotary_factor": 0.5}),
    "glm without": ({**LLAMA, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 30}, {"biases": None, "qk_norm": None}),
    "a part of a head in dimensions": ({**MINIMAX, "rotary_dim": 8}, {"partial_rotary_factor": 0.25}),
    "all of a head": ({**MINIMAX, "rotary_dim": 32}, {"partial_rotary_factor": 1.0, "moe_ffn_hidden_size": 200}),
    "layers without positions, listed": ({**SMOL, "no_rope_layers": [1, 1, 0, 1, 1, 0, 1]}, {"no_rope_every": 3}),
    "every layer rotates": ({**SMOL, "no_rope_layers": [1] * 6}, {"no_rope_every": 0}),
    "smollm's own": (SMOL, {"no_rope_every": 4, "rope_theta": 2e6}),
    # RoPE: rope_theta and rope_scaling, later rope_parameters; Gemma 3 for each kind of layer.
    "the older key of a kind": (
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
    ),
    "both keys": ({**LLAMA, "rope_scaling": {"type": "x", "rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "linear"}}),
    "the newer mapping": (
        {**LLAMA, "rope_theta": 1, "rope_parameters": {"rope_theta": 5e5, **YARN},
         "rope_scaling": {"rope_type": "linear"}},
        {"rope_theta": 5e5, "rope_scaling": YARN},
    ),
    "no scaling": ({**LLAMA, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_scaling": None,
        "rope_theta": 5e5}),
    "phi3's older names": (
        {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": {"type": "su",
         "long_factor": [1, 2.0]}},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": (1, 2.0), "original_max_position_embeddings": 64}},
    ),
    "llama's yarn stays yarn": ({**LLAMA, "rope_scaling": {"type": "yarn"}}, {"rope_scaling": {"rope_type": "yarn"}}),
    "the length that a scaling says itself": (
        {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 64,
         "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 32}},
        {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 32}},
    ),
    "neox's names": ({**LLAMA, "model_type": "gpt_neox", "rotary_emb_base": 500, "rotary_pct": 0.5},
                     {"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "rotated part in the mapping": (
        {**LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
        {"partial_rotary_factor": 1.0},
    ),
    "gemma 3's two bases": (GEMMA3, {"rope_theta": 1e6, "local_rope_theta": 10000.0, "full_attention_every": 6}),
    "gemma 3's older key": ({**GEMMA3, "rope_local_base_freq": 500, "rope_scaling": YARN}, {"local_rope_theta": 500.0,
        "rope_scaling": YARN}),
    "gemma 3's mapping of each kind": (
        {**GEMMA3, "rope_local_base_freq": 500, "rope_parameters": {
            "full_attention": {"rope_theta": 7.0, **YARN}, "sliding_attention": {"rope_theta": 8.0,
            "rope_type": "default"}}},
        {"rope_theta": 7.0, "rope_scaling": YARN, "local_rope_theta": 8.0},
    ),
    "gemma 3's local layers alone": (
        {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_theta": 8.0}}}, {"rope_theta": 1e6,
         "local_rope_theta": 8.0}
    ),
    "olmo 3's one base": ({**LLAMA, "model_type": "olmo3", "sliding_window": 8, "rope_theta": 5e5}, {
        "rope_theta": 5e5, "local_rope_theta": 5e5}),
    "a pattern of windows": ({**GEMMA3, "sliding_window_pattern": 3}, {"full_attention_every": 3}),
    "listed layers": (
        {**GEMMA3, "layer_types": ["sliding_attention", "full_attention"] * 3}, {"full_attention_every": 2}
    ),
    "windows in all layers": ({**GEMMA3, "layer_types": ["sliding_attention"] * 6}, {"full_attention_every": 0}),
    "a window that is not used": ({**LLAMA, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
        {}),
    # Text parts of models of images: multimodal RoPE is that of the family where there are no images.
    "a whole model's file": (
        {**LLAMA, "model_type": "qwen2_5_vl", "num_key_value_heads": 3,
         "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"family": "qwen2", "rope_scaling": None, "num_layers": 6},
    ),
    "a text part with experts, always normalised": (
        {"model_type": "qwen3_vl_moe", "tie_word_embeddings": True, "text_config": {
            **QWEN_MOE, "model_type": "qwen3_vl_moe_text", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
            "num_key_value_heads": 6, "norm_topk_prob": False,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True}}},
        {"family": "qwen3_moe", "rope_scaling": None, "norm_topk_prob": True, "tied_embeddings": True},
    ),
    # Two stacks.
    "t5": (T5, {"num_layers": 5, "encoder_layers": 5, "tied_embeddings": True, "norm_eps": 1e-6,
        "feed_forward_proj": "relu",
                "max_position_embeddings": 512, "relative_attention_buckets": 32,
                "relative_attention_max_distance": 128,
                "head_dim": 16, "hidden_size": 90, "rope_theta": None, "num_key_value_heads": 6}),
    "t5 1.1": (
        {**T5, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
         "n_positions": 64,
         "layer_norm_epsilon": 1e-5},
        {"num_layers": 3, "encoder_layers": 5, "tied_embeddings": False, "feed_forward_proj": "gated-gelu",
         "max_position_embeddings": 64, "norm_eps": 1e-5},
    ),
    "t5 with the heads of its class": ({**T5, "d_kv": None}, {"head_dim": 64}),
    "t5 by the decoder's scaling": ({**T5, "scale_decoder_outputs": False}, {"tied_embeddings": False}),
    "bart": ({**BART, "scale_embedding": True}, {"num_layers": 5, "encoder_layers": 3, "head_dim": 16,
        "scale_embedding": True,
                                                 "tied_embeddings": True, "norm_eps": 1e-5, "ffn_hidden_size": 200}),
    "bart untied": ({**BART, "tie_word_embeddings": False}, {"tied_embeddings": False, "scale_embedding": False}),
}  # fmt: skip


def read(config: dict[str, Any]) -> ModelSpec:
    return model_from_config(config, "m", "config.json")


@pytest.mark.parametrize("case", READ)
def test_a_file_means_what_its_class_makes_of_it(case: str) -> None:
    config, expected = READ[case]
    model = read(config)
    assert {field: getattr(model, field) for field in expected} == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lacks vocab_size": ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "m"),
    "lacks intermediate_size": ({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, "m"),
    "5 attention heads do not divide the hidden size 96": ({**LLAMA, "num_attention_heads": 5}, "m"),
    "0 attention heads": ({**LLAMA, "num_attention_heads": 0}, "divide"),
    "attention_bias=True of m is not computed here": ({**LLAMA, "attention_bias": True},
        "only attention_bias=False is"),
    "qkv_bias=False of m": ({**QWEN_MOE, "shared_expert_intermediate_size": 100, "qkv_bias": False}, "qkv_bias=True"),
    "hidden_act=7 of m is no name": ({**LLAMA, "hidden_act": 7}, "give one"),
    "hidden_act='relu' of m is not computed": ({**LLAMA, "hidden_act": "relu"}, "only hidden_act='silu'"),
    "new_decoder_architecture=True with parallel_attn=False": (
        {**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, "use either"),
    "qk_nope_head_dim='x', qk_rope_head_dim=4": ({**V2, "qk_nope_head_dim": "x"}, "whole numbers"),
    "no_rope_layers=[1, 0, 0, 1, 1, 1] of m": ({**SMOL, "no_rope_layers": [1, 0, 0, 1, 1, 1]}, "equal steps"),
    "no_rope_layers=[1, 1, 0] of m": ({**SMOL, "no_rope_layers": [1, 1, 0]}, "no_rope_layer_interval alone"),
    "attention_multiplier=0.3 of m": ({**GRANITE, "attention_multiplier": 0.3}, "use 0.30151134457776363"),  # 11
    "attention_multiplier=2.0 of m": ({**GRANITE, "attention_multiplier": 2.0}, "use 1.0"),
    "attention_multiplier=0.0001 of m": ({**GRANITE, "attention_multiplier": 1e-4}, "use 1.0"),
    "logits_divisor=True": ({**GRANITE, "logits_scaling": True}, "should be a valid number"),
    "attention_multiplier='1' of m is no number": ({**GRANITE, "attention_multiplier": "1"}, "give one"),
    "shared_expert_intermediate_size=250 of m is no multiple": (
        {**QWEN_MOE, "shared_expert_intermediate_size": 250}, "moe_intermediate_size=100"),
    "shared_expert_intermediate_size=0 of m": ({**QWEN_MOE, "shared_expert_intermediate_size": 0}, "multiple"),
    "rotary_dim=33 of m is no part of head_dim=32": ({**MINIMAX, "rotary_dim": 33}, "no larger"),
    "rotary_dim=0 of m": ({**MINIMAX, "rotary_dim": 0}, "no part"),
    "rope_type=7 of m": ({**LLAMA, "rope_scaling": {"rope_type": 7}}, "no name of a scaling"),
    "rope_scaling=8 of m is not a mapping": ({**LLAMA, "rope_scaling": 8}, "leave it out"),
    "a rotary base or factor of m is 'x'": ({**LLAMA, "rope_theta": "x"}, "give one"),
    "a rotary base or factor of m is True": ({**LLAMA, "rope_scaling": {"type": "yarn", "beta_fast": True}},
        "give one"),
    "a rotary base or factor of m is None": ({**LLAMA, "rope_scaling": {"type": "x", "long_factor": [1.0, None]}},
        "give one"),
    "layer_types=[1] of m is no list": ({**LLAMA, "layer_types": [1]}, "give one"),
    "layer_types='x' of m is no list": ({**LLAMA, "layer_types": "x"}, "give one"),
    "sliding_window=8 of m: gemma3_text has it in layers that do not follow": (
        {**GEMMA3, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 3}, "own layer_types"),
    "sliding_window=8 of m: qwen2": (
        {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "use_sliding_window=false"),
    "model_type=None of m is no name": ({"hidden_size": 8}, "needs name, family, num_layers, hidden_size, "),
    "model_type='' of m": ({"model_type": ""}, "supported are llama"),
    "name of the model's directory='a\\nb'": ({}, "U+000A"),
    "feed_forward_proj='gated-silu' of m": ({**T5, "feed_forward_proj": "gated-silu"}, "'relu' or 'gated-gelu' is"),
    "config.json of m lacks d_ff": ({**T5, "d_ff": None}, "d_ff"),
    "activation_function='relu' of m": ({**BART, "activation_function": "relu"}, "'gelu' is"),
    "encoder_ffn_dim=200 and decoder_ffn_dim=8 of m": ({**BART, "decoder_ffn_dim": 8}, "one width"),
    "encoder_attention_heads=6 and decoder_attention_heads=3": ({**BART, "decoder_attention_heads": 3}, "alike"),
    "7 attention heads do not divide the hidden size 96": (
        {**BART, "encoder_attention_heads": 7, "decoder_attention_heads": 7}, "m"),
    "0 attention heads do not divide the hidden size 96": (
        {**BART, "encoder_attention_heads": 0, "decoder_attention_heads": 0}, "m"),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_computed_is_refused(said: str) -> None:
    config, fix = REFUSED[said]
    refused = refusal(SpecError, model_from_config, config, "a\nb" if "directory" in said else "m", "config.json")
    assert said in refused
    assert fix in refused


WRITTEN: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "llama": (read(LLAMA), {"hidden_size": 96, "num_hidden_layers": 6, "hidden_act": "silu", "attention_dropout": 0.0,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-6}),
    "gpt2's older name of its activation": (read(GPT2), {"activation_function": "gelu_new", "n_inner": 384}),
    "gemma's": (read({**LLAMA, "model_type": "gemma"}), {"hidden_act": "gelu_pytorch_tanh"}),
    "latent": (read(V2), {"kv_lora_rank": 5, "q_lora_rank": None, "topk_method": "greedy", "n_routed_experts": 8}),
    "groups": (read({**V2, "topk_method": "x"}), {"topk_method": "group_limited_greedy", "n_group": 4}),
    "falcon 7b": (read(FALCON), {"new_decoder_architecture": False, "multi_query": True,
        "num_ln_in_parallel_attn": None,
                                 "bias": False, "alibi": False, "num_kv_heads": 1}),
    "falcon 40b": (read({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3}),
                   {"new_decoder_architecture": True, "multi_query": False, "num_ln_in_parallel_attn": 2,
                    "num_kv_heads": 3}),
    "falcon 11b": (read({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}),
                   {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "falcon rw": (read({**FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
                  {"new_decoder_architecture": False, "multi_query": False, "bias": True, "alibi": True,
                   "parallel_attn": False}),
    "phi3's length, where its class reads it": (
        read({**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": {"type": "su"}}),
        {"original_max_position_embeddings": 64}),
    "phi3 without scaling": (read({**LLAMA, "model_type": "phi3"}), {"original_max_position_embeddings": 256}),
    "smollm's layers": (read({**SMOL, "no_rope_layer_interval": 3}), {"no_rope_layer_interval": 3,
        "no_rope_layers": [1, 1, 0] * 2}),
    "all with positions": (read({**SMOL, "no_rope_layers": [1] * 6}), {"no_rope_layer_interval": 7,
        "no_rope_layers": [1] * 6}),
    "granite": (read(GRANITE), {"attention_multiplier": 0.0625}),
    "shared experts": (read({**QWEN_MOE, "shared_expert_intermediate_size": 300}),
        {"shared_expert_intermediate_size": 300}),
    "glm": (load_model("glm-4.5-air"), {"attention_bias": True, "use_qk_norm": False}),
    "a part of a head": (read({**LLAMA, "model_type": "gpt_neox"}), {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    "a whole head where a part is usual": (
        read({**LLAMA, "model_type": "gpt_neox", "rotary_pct": 1.0}), {"rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    "two kinds of layers": (read({**GEMMA3, "sliding_window_pattern": 3, "rope_scaling": YARN}), {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "t5": (read({**T5, "num_decoder_layers": 3, "tie_word_embeddings": False}), {
        **T5, "num_decoder_layers": 3, "tie_word_embeddings": False, "n_positions": 512, "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": "relu",
        "dropout_rate": 0.0}),
    "bart": (read({**BART, "scale_embedding": True}), {
        **BART, "scale_embedding": True, "decoder_start_token_id": None, "dropout": 0.0, "activation_dropout": 0.0,
        "attention_dropout": 0.0, "tie_word_embeddings": True, "forced_eos_token_id": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_a_shape_is_written_as_its_class_reads_it(case: str) -> None:
    model, expected = WRITTEN[case]
    written = config_from_model(model)
    assert {key: written.get(key, "missing") for key in expected} == expected
    assert read(written).traits == model.traits


UNWRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "num_key_value_heads=3 of m: Falcon without parallel_residual": (
        {**FALCON, "parallel_attn": False}, {"num_key_value_heads": 3}),
    "norm_eps=0.001 of m: family opt has no choice of it; use 1e-05": (
        {**LLAMA, "model_type": "opt", "ffn_dim": 200}, {"norm_eps": 1e-3}),
    "ffn_hidden_size=200 of m: family bloom has no choice of it; use 384": (
        {**LLAMA, "model_type": "bloom"}, {"ffn_hidden_size": 200}),
    "moe_ffn_hidden_size=30 of m: family mixtral": ({**LLAMA, "model_type": "mixtral"}, {"moe_ffn_hidden_size": 30}),
    "rope_theta=null for m": (LLAMA, {"rope_theta": None}),
    "norm_eps=0.001 of m: family bart": (BART, {"norm_eps": 1e-3}),
}  # fmt: skip


@pytest.mark.parametrize("said", UNWRITTEN)
def test_what_a_class_cannot_express_is_not_written(said: str) -> None:
    config, change = UNWRITTEN[said]
    assert said in refusal(SpecError, config_from_model, dataclasses.replace(read(config), **change))


# A model type that no family describes. Without transformers: Llama's matrices, added up by hand.

MINE: dict[str, Any] = {
    "model_type": "mine", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 160, "vocab_size": 96,
}  # fmt: skip
OF_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 30, "num_experts_per_tok": 2, "n_shared_experts": 2,
              "first_k_dense_replace": 1}  # fmt: skip
ATTENTION, MLP, TABLES, NORMS = 2 * 64 * 16 * (4 + 2), 3 * 64 * 160, 2 * 96 * 64, (2 * 4 + 1) * 64
LINEAR = {"linear_num_value_heads": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7}
HALF = {"layer_types": ["linear_attention", "full_attention"]}
ESTIMATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a decoder": ({}, {
        "tables": TABLES, "matrices": 4 * (ATTENTION + MLP), "parameters": TABLES + 4 * (ATTENTION + MLP) + NORMS,
        "experts": 0, "recurrent": 0, "attention_layers": 4, "recurrent_layers": 0, "mlp_layers": 4, "counted": False,
        "norm": "rmsnorm", "gated_mlp": True, "fused_attention": True, "state": 0, "windowed_layers": 0,
        "max_position_embeddings": 2**20, "activation": "silu", "eager_gelu": False, "num_experts": 0}),
    "tied, of older names and norms": (
        {"hidden_size": None, "n_embd": 64, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
         "hidden_act": "gelu_new"},
        {"tables": TABLES // 2, "matrices": 4 * (ATTENTION + 2 * 64 * 160), "norm": "layernorm", "gated_mlp": False,
         "activation": "gelu_tanh", "eager_gelu": True, "tied_embeddings": True}),
    "experts after a dense layer": (OF_EXPERTS, {
        "experts": 3 * 8 * 3 * 64 * 30, "mlp_layers": 1, "num_shared_experts": 2, "first_dense_layers": 1,
        "matrices": 4 * ATTENTION + MLP + 3 * (2 * 3 * 64 * 30 + 8 * 64), "moe_ffn_hidden_size": 30}),
    "experts without a width or number": (
        {"num_experts": 8, "shared_expert_intermediate_size": 160, "first_k_dense_replace": 9},
        {"moe_ffn_hidden_size": 160, "experts_per_token": 1, "num_shared_experts": 1, "mlp_layers": 4, "experts": 0}),
    "one expert is none": ({**OF_EXPERTS, "num_experts": 1}, {"num_experts": 0, "moe_ffn_hidden_size": 0,
        "mlp_layers": 4}),
    "latent attention": ({**LATENT, "num_key_value_heads": 4}, {
        "matrices": 4 * (64 * 4 * 15 + 64 * 9 + 5 * 4 * (11 + 9) + 4 * 9 * 64 + MLP), "head_dim": 15}),
    "latent attention of two steps": ({**LATENT, "q_lora_rank": 7}, {
        "matrices": 4 * (7 * (64 + 4 * 15) + 64 * 9 + 5 * 4 * (11 + 9) + 4 * 9 * 64 + MLP), "num_key_value_heads": 4}),
    "linear attention in every other layer": ({**HALF, **LINEAR}, {
        "matrices": 2 * ATTENTION + 2 * 3 * 64 * 64 + 4 * MLP, "recurrent": 2 * 3 * 64 * 64, "recurrent_layers": 2,
        "attention_layers": 2, "state": 3 * 5 * 7, "state_width": 3 * (5 + 7)}),
    "a state wider than the layer": ({**HALF, **LINEAR, "linear_key_head_dim": 50}, {
        "recurrent": 2 * 3 * 64 * 3 * 57, "state_width": 3 * 57}),
    "full attention in each third layer": ({"full_attention_interval": 3, "mamba_d_state": 8}, {
        "recurrent_layers": 3, "state": 64 * 8, "state_width": 64 + 8}),
    "mamba with heads": ({"attn_layer_period": 2, "ssm_state_size": 8, "mamba_num_heads": 3, "mamba_head_dim": 5}, {
        "state": 15 * 8, "state_width": 15 + 3 * 8, "recurrent_layers": 2}),
    "mamba that expands": ({**HALF, "state_size": 8, "expand": 2}, {"state": 128 * 8, "state_width": 128 + 8}),
    "convolutions": ({"layer_types": ["conv"], "conv_L_cache": 3}, {"state": 64 * 3, "state_width": 0,
        "recurrent_layers": 4}),
    "recurrence of a width": ({"block_types": ["recurrent"], "lru_width": 100}, {"state": 100, "state_width": 0}),
    "heads of another kind, inside": ({**HALF, "linear_attn_config": {"num_heads": 2, "head_dim": 8}}, {
        "state": 2 * 64, "state_width": 2 * 2 * 8}),
    "heads that are not said": ({**HALF, "head_dim": None}, {"state": 4 * 16 * 16, "state_width": 128}),
    "windows in listed layers": (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "chunked_attention", "local"]},
        {"windowed_layers": 3, "sliding_window": 8}),
    "windows in all layers": ({"sliding_window": 8, "attn_logit_softcapping": 50}, {
        "windowed_layers": 4, "attention_softcap": 50.0, "fused_attention": False}),
    "no window": ({"sliding_window": 0, "final_logit_softcapping": 30}, {"sliding_window": None,
        "logit_softcap": 30.0}),
    "what it is": ({}, {"name": "m", "family": "transformers", "source": "config.json, model_type mine",
        "rope_theta": None, "tied_embeddings": False}),
    "some sizes of latent attention": ({"kv_lora_rank": 5}, {"latent": None, "head_dim": 16, "num_key_value_heads": 2}),
    "one head of keys": ({"multi_query": True}, {"num_key_value_heads": 1}),
    "heads that do not divide": ({"num_key_value_heads": 3}, {"num_key_value_heads": 4}),
    "heads that nobody says": ({"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None,
        "hidden_size": 192},
                               {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}),
    "a narrow layer has one head": (
        {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None, "hidden_size": 32},
        {"num_attention_heads": 1, "head_dim": 32}),
    "the widest layer": ({"intermediate_size": [100, 160, 80]}, {"ffn_hidden_size": 160}),
    "four times as wide": ({"intermediate_size": None}, {"ffn_hidden_size": 256}),
}  # fmt: skip


def fields(model: ModelSpec, names: Iterable[str]) -> dict[str, Any]:
    """Of the model, or of its approximation."""
    known = model.approximate
    return {name: getattr(known if hasattr(known, name) else model, name) for name in names}


@pytest.mark.parametrize("case", ESTIMATED)
def test_what_transformers_does_not_count_is_estimated(case: str) -> None:
    change, expected = ESTIMATED[case]
    assert fields(approximated({**MINE, **change}, None, "m", "config.json"), expected) == expected


ANSWER: dict[str, Any] = {
    "sizes": MINE, "config": {"model_type": "mine"}, "tied": True, "layers": 5, "traits": {"norm": "layernorm"},
    "parameters": 1000, "tables": 10, "matrices": 900, "recurrent": 20, "experts": 0, "attention_layers": 4,
    "recurrent_layers": 9, "mlp_layers": 2, "experts_layers": 0, "mlp": 2 * 2 * 64 * 160,
}  # fmt: skip
COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two matrices of the MLP": ({}, {
        "gated_mlp": False, "num_layers": 5, "parameters": 1000, "tables": 10, "matrices": 900, "recurrent": 20,
        "recurrent_layers": 5, "attention_layers": 4, "mlp_layers": 2, "tied_embeddings": True, "norm": "layernorm",
        "counted": True, "config": {"model_type": "mine"}, "num_experts": 0}),
    "three": ({"mlp": 3 * 2 * 64 * 160}, {"gated_mlp": True}),
    "no MLP": ({"mlp_layers": 0}, {"gated_mlp": True}),
    "experts of three matrices": (
        {"experts_layers": 3, "experts": 3 * 8 * 64 * 3 * 31, "sizes": {**MINE, **OF_EXPERTS}},
        {"moe_ffn_hidden_size": 31, "first_dense_layers": 2, "gated_mlp": True, "num_experts": 8}),
    "experts of two matrices": (
        {"experts_layers": 5, "experts": 5 * 8 * 64 * 2 * 30, "sizes": {**MINE, **OF_EXPERTS}},
        {"moe_ffn_hidden_size": 30, "first_dense_layers": 0, "gated_mlp": False}),
    "experts in no layer": ({"sizes": {**MINE, **OF_EXPERTS}}, {"num_experts": 0, "moe_ffn_hidden_size": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_the_count_corrects_the_configuration(case: str) -> None:
    change, expected = COUNTED[case]
    assert fields(approximated(MINE, {**ANSWER, **change}, "m", "config.json"), expected) == expected


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        ({"auto_map": {}}, {"refused": "unknown"}, "is code in its repository (auto_map)"),
        ({}, {"refused": "unknown"}, "a newer version may know it. Described without it are llama, "),
        ({}, {"refused": "no causal language model", "model_type": "mine"}, "model_type='mine' of m: it is no causal"),
        ({}, {"refused": "no causal language model", "model_type": "inner"}, "m: its text part 'inner' is no causal"),
        ({}, {"refused": "odd\nsize"}, "refuses config.json of m (model_type 'mine'): odd\\nsize; correct"),
        ({"vocab_size": None}, None, "config.json of m lacks vocab_size; correct"),
        ({"num_hidden_layers": 0}, None, "num_layers=0 of m should be a whole number from 1 to 16777216"),
        ({"num_attention_heads": 2**24 + 1}, None, "num_attention_heads=16777217 of m"),
    ],
)
def test_what_cannot_be_approximated(kind: dict[str, Any], answer: dict[str, Any] | None, said: str) -> None:
    assert said in refusal(SpecError, approximated, {**MINE, **kind}, answer, "m", "config.json")


def test_a_count_is_asked_for_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = Mock(return_value=SimpleNamespace(stdout=json.dumps(ANSWER)))
    monkeypatch.setattr(subprocess, "run", run)
    assert [
        counting.counted(config, "m") for config in ({"b": 1, "model_type": "mine"}, {"model_type": "mine", "b": 1})
    ] == [ANSWER] * 2
    ((words,), how) = run.call_args
    assert (run.call_count, words[1:]) == (1, ["-m", "kit.engines.huggingface.count_parameters"])
    asked = (how["input"], how["env"]["HF_HUB_OFFLINE"], how["env"]["CUDA_VISIBLE_DEVICES"])
    assert asked == ('{"b": 1, "model_type": "mine"}', "1", "")
    assert [kept.suffix for kept in (tmp_path / "kit" / "counted").iterdir()] == [".json"]
    read_back = model_from_config({"b": 1, "model_type": "mine"}, "m", "c").approximate
    assert read_back == approximated({"model_type": "mine"}, ANSWER, "m", "c").approximate
    run.return_value.stdout = "Traceback"  # of another configuration, which has a count of its own
    refused = refusal(SpecError, counting.counted, {"model_type": "other"}, "m")
    assert "no answer for config.json of m (JSONDecodeError)" in refused


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_of_a_model_of_pictures_is_read(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "version", Mock(side_effect=PackageNotFoundError("transformers")))
    shown = {"model_type": "pictures", "text_config": {**LLAMA, "num_hidden_layers": 3}, "tie_word_embeddings": tied}
    found = model_from_config(shown, "m", "config.json")
    assert (found.family, found.num_layers, found.tied_embeddings) == ("llama", 3, tied)
    assert found.source == "config.json, text part of pictures"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no config.json; give the directory"), ("{", "cannot be read as JSON"), ("[1]", "holds a list"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"), (" " * (1 << 23) + "{}", "at most 8388608"),
    ],
    ids=["missing", "no JSON", "a list", "a key twice", "too long"],
)  # fmt: skip
def test_a_directory_without_a_readable_file(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert said in refusal(SpecError, read_config, tmp_path)


def test_a_directory_is_named_as_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_with(tmp_path / "mine" / "config.json", json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path / "mine")
    for path in (".", "../mine", tmp_path / "mine" / "config.json"):
        found = load_model(path)
        assert (found.name, found.source) == ("mine", "config.json")

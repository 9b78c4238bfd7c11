"""What families have beyond a plain transformer, small: changes to the models of tests/support/tiny.py."""

from __future__ import annotations

from typing import Any

WINDOW = {"sliding_window": 7}  # cuts at every place of a sequence of 32, and divides nothing
CAPPED = WINDOW | {
    "full_attention_every": 2,
    "attention_softcap": 2.0,  # scores and logits of a tiny model are small: caps that bend them
    "logit_softcap": 3.0,
    "query_pre_attn_scalar": 4,
}
TWO_ROTATIONS = WINDOW | {"full_attention_every": 2, "local_rope_theta": 100.0, "query_pre_attn_scalar": 12}
NEOX = {"parallel_residual": True, "partial_rotary_factor": 0.5}
DEEPSEEK = {
    "num_experts": 8,
    "experts_per_token": 4,
    "router_groups": 4,
    "router_top_groups": 2,
    "routed_scaling_factor": 2.5,
    "num_shared_experts": 1,
    "first_dense_layers": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
LLAMA_4_SCALING = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL = {"rope_scaling": YARN | LLAMA_4_SCALING | {"original_max_position_embeddings": 32}}
NO_POSITIONS = {"no_rope_every": 2}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_divisor": 2.0,
    "query_pre_attn_scalar": 4,
}
OLMO3 = {"sliding_window": 11, "full_attention_every": 2, "local_rope_theta": 10000.0, "rope_scaling": YARN}
GLM = {
    "num_experts": 8,
    "experts_per_token": 4,
    "routed_scaling_factor": 2.5,
    "num_shared_experts": 1,
    "first_dense_layers": 1,
    "partial_rotary_factor": 0.5,
    "biases": "qkv",
    "qk_norm": "head",
}
MINIMAX = {"partial_rotary_factor": 0.5}
GPT_OSS = WINDOW | {"full_attention_every": 2, "rope_scaling": YARN | {"truncate": False}}

BY_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "gemma2": CAPPED,
    "gemma3_text": TWO_ROTATIONS,
    "gpt_neox": NEOX,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "smollm3": NO_POSITIONS,
    "granite": GRANITE,
    "ministral3": MINISTRAL,
    "olmo3": OLMO3,
    "glm4_moe": GLM,
    "minimax_m2": MINIMAX,
}
"""The others have nothing."""

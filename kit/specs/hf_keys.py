"""Each family's ``config.json``: the key of every field of ModelSpec, and keys with a fixed value.

One table for reading and writing. Read in transformers 5.23 (``configuration_*.py``): names, and defaults of missing
keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.specs.families import Activation, Family

SPELLINGS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu",),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
    "relu": ("relu",),
    "clamped_swiglu": ("silu",),
}
"""Activation → transformers' names for it (transformers/activations.py)."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """One family's ``config.json``."""

    names: Mapping[str, str]
    """Field of ModelSpec → key. Fields of ``latent`` are written as ``latent.kv_lora_rank``."""
    defaults: Mapping[str, Any]
    """Field → its value if the key is missing or null; keys of other fields are required."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that must have this value, if present."""
    writes: Mapping[str, Any] = field(default_factory=dict)
    """Keys that kit writes but does not read: no dropout, no losses other than that of tokens."""
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key → other names of it in files."""
    activation: str | None = "hidden_act"
    """Key of the activation; None if the family has no such key."""
    spellings: Mapping[str, Activation] = field(default_factory=dict)
    """Activation names with another meaning in this family."""
    mlp_ratio: int | None = None
    """``ffn_hidden_size`` / ``hidden_size`` if the file has no key for it."""
    full_attention_every: int = 0
    """``full_attention_every`` of ModelSpec, for files that do not list their layers."""
    rope_theta: float = 10000.0
    """RoPE base if the file has none."""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """The family's names of ``rope_theta`` and ``partial_rotary_factor`` in files before transformers 5."""
    partial_rotary_factor: float = 1.0


_LLAMA = Keys(
    names={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "tied_embeddings": "tie_word_embeddings",
        "norm_eps": "rms_norm_eps",
    },
    defaults={"tied_embeddings": False, "norm_eps": 1e-6},
    only={"mlp_bias": False, "attention_bias": False},
    writes={"attention_dropout": 0.0},
)


def _like(
    base: Keys,
    *,
    names: Mapping[str, str | None] | None = None,
    defaults: Mapping[str, Any] | None = None,
    **others: Any,
) -> Keys:
    """``base`` with changed names (None removes a name) and additional defaults."""
    named = {key: value for key, value in {**base.names, **(names or {})}.items() if value is not None}
    return dataclasses.replace(base, names=named, defaults={**base.defaults, **(defaults or {})}, **others)


def _without(base: Keys, *fields: str) -> Keys:
    return _like(base, names=dict.fromkeys(fields))


_WINDOW = {"sliding_window": "sliding_window"}
_NO_WINDOW = {"sliding_window": None}
_EVEN = _without(_LLAMA, "head_dim")
_OLMO = _like(_EVEN, defaults={"norm_eps": 1e-5}, only={"attention_bias": False})
_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

_GEMMA = _like(_LLAMA, defaults={"tied_embeddings": True})
_CAPPED = {
    **_WINDOW,
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
}
_GEMMA_ONLY = {"attention_bias": False, "use_bidirectional_attention": (None, False)}

_MOE = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_ROUTER = {"output_router_logits": False}

_DEEPSEEK_EXPERTS = {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    "norm_topk_prob": "norm_topk_prob",
    "router_groups": "n_group",
    "router_top_groups": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
_DEEPSEEK_DEFAULTS = {"router_groups": 1, "router_top_groups": 1, "routed_scaling_factor": 1.0}
_DEEPSEEK = _like(
    _without(_LLAMA, "head_dim"),
    names={
        **_DEEPSEEK_EXPERTS,
        "latent.q_lora_rank": "q_lora_rank",
        "latent.kv_lora_rank": "kv_lora_rank",
        "latent.nope_head_dim": "qk_nope_head_dim",
        "latent.rope_head_dim": "qk_rope_head_dim",
        "latent.value_head_dim": "v_head_dim",
    },
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "first_dense_layers": 0,
        "norm_topk_prob": False,
        "latent.q_lora_rank": None,
    },
    only={"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1},
    writes={"attention_dropout": 0.0, **_ROUTER},
)

_BART = _like(
    _without(_EVEN, "num_key_value_heads", "norm_eps"),  # torch's default eps; no key changes it
    names={
        "num_layers": "decoder_layers",
        "encoder_layers": "encoder_layers",
        "hidden_size": "d_model",
        "ffn_hidden_size": "encoder_ffn_dim",
        "num_attention_heads": "encoder_attention_heads",
        "scale_embedding": "scale_embedding",
    },
    defaults={"tied_embeddings": True, "scale_embedding": False},
    only={},
    writes={"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "forced_eos_token_id": None},
    activation="activation_function",
)

KEYS: Mapping[Family, Keys] = {
    "llama": _LLAMA,
    # An absent key is Mistral's default of 4096; null is no window.
    "mistral": _like(_LLAMA, names=_WINDOW, defaults={"sliding_window": 4096}),
    "qwen2": _like(_LLAMA, only={}),
    "qwen3": _like(_LLAMA, only={"attention_bias": False}),
    # "gelu" is a legacy spelling that means the approximation (configuration_gemma.py, __post_init__).
    "gemma": _like(_GEMMA, only=_GEMMA_ONLY, spellings={"gelu": "gelu_tanh"}),
    "gemma2": _like(
        _GEMMA,
        names=_CAPPED,
        defaults={
            "sliding_window": 4096,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "query_pre_attn_scalar": 256,
        },
        only=_GEMMA_ONLY,
        activation="hidden_activation",
        full_attention_every=2,
    ),
    "gemma3_text": _like(
        _GEMMA,
        names=_CAPPED,
        defaults={
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "attention_softcap": None,
            "logit_softcap": None,
            "query_pre_attn_scalar": 256,
        },
        only=_GEMMA_ONLY,
        activation="hidden_activation",
        rope_theta=1_000_000.0,
        full_attention_every=6,
    ),
    "phi3": _like(
        _EVEN,
        names=_WINDOW,
        defaults={"norm_eps": 1e-5, **_NO_WINDOW},
        writes={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "seed_oss": _like(
        _LLAMA,
        defaults={"head_dim": 128},
        only={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        writes={"attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "smollm3": _like(
        _EVEN,
        names={"no_rope_every": "no_rope_layer_interval"},
        defaults={"tied_embeddings": True, "no_rope_every": 4},
        only={**_LLAMA.only, "use_sliding_window": (False, None)},
        rope_theta=2_000_000.0,
    ),
    "granite": _like(
        _EVEN,
        names={
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "logits_divisor": "logits_scaling",
        },
        defaults={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_divisor": 1.0},
    ),
    "ministral3": _like(_LLAMA, names=_WINDOW, defaults={"norm_eps": 1e-5, "head_dim": 128, **_NO_WINDOW}, only={}),
    "olmo2": _OLMO,
    "olmo3": _like(
        _OLMO,
        names=_WINDOW,
        defaults={"sliding_window": 4096},
        rope_theta=500_000.0,
        full_attention_every=4,
    ),
    "starcoder2": _like(
        _EVEN,
        names={"norm_eps": "norm_epsilon", **_WINDOW},
        defaults={"norm_eps": 1e-5, "tied_embeddings": True, **_NO_WINDOW},
        only={"use_bias": True},
        writes={"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "gpt2": Keys(
        names={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "ffn_hidden_size": "n_inner",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "n_positions",
            "tied_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
        },
        defaults={"tied_embeddings": True, "norm_eps": 1e-5},
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        writes={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        activation="activation_function",
        mlp_ratio=4,
    ),
    "gpt_neox": _like(
        _without(_EVEN, "num_key_value_heads"),
        names={"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
        defaults={"norm_eps": 1e-5, "parallel_residual": True},
        only={"attention_bias": True},
        writes=_DROPOUT,
        rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        partial_rotary_factor=0.25,
    ),
    "opt": _like(
        _without(_EVEN, "num_key_value_heads", "norm_eps"),
        names={"ffn_hidden_size": "ffn_dim"},
        defaults={"tied_embeddings": True},
        only={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
        writes={"attention_dropout": 0.0, "dropout": 0.0, "layerdrop": 0.0},
        activation="activation_function",
    ),
    "bloom": _like(
        _without(_EVEN, "num_key_value_heads", "ffn_hidden_size"),
        names={
            "num_layers": "n_layer",
            "num_attention_heads": "n_head",
            # No longer a key of BloomConfig, but files have it.
            "max_position_embeddings": "seq_length",
            "norm_eps": "layer_norm_epsilon",
        },
        defaults={"norm_eps": 1e-5, "tied_embeddings": True, "max_position_embeddings": 2048},
        only={"apply_residual_connection_post_layernorm": False},
        writes=_DROPOUT,
        also={"n_layer": ("num_hidden_layers",), "n_head": ("num_attention_heads",), "hidden_size": ("n_embed",)},
        activation=None,
        mlp_ratio=4,
    ),
    "falcon": _like(
        _EVEN,
        names={
            "ffn_hidden_size": "ffn_hidden_size",
            "norm_eps": "layer_norm_epsilon",
            "parallel_residual": "parallel_attn",
            "num_key_value_heads": None,
        },
        defaults={
            "norm_eps": 1e-5,
            "parallel_residual": True,
            "tied_embeddings": True,
            "max_position_embeddings": 2048,
        },
        only={},
        writes=_DROPOUT,
        also={
            "num_hidden_layers": ("n_layer",),
            "num_attention_heads": ("n_head",),
            "hidden_size": ("n_embed",),
        },
        activation="activation",
        mlp_ratio=4,
    ),
    "mixtral": _like(
        _LLAMA,
        names={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok", **_WINDOW},
        defaults={"norm_eps": 1e-5, "num_experts": 8, "experts_per_token": 2, **_NO_WINDOW},
        only={},
        writes={"attention_dropout": 0.0, "router_jitter_noise": 0.0, **_ROUTER},
        also={"num_local_experts": ("num_experts",)},
    ),
    "qwen2_moe": _like(
        _EVEN,
        names={
            **_MOE,
            "moe_ffn_hidden_size": "moe_intermediate_size",
            "norm_topk_prob": "norm_topk_prob",
        },
        defaults={
            "num_experts": 60,
            "experts_per_token": 4,
            "moe_ffn_hidden_size": 1408,
            "norm_topk_prob": False,
        },
        only={
            "mlp_only_layers": ([], None),
            "decoder_sparse_step": 1,
            "qkv_bias": True,
            "use_sliding_window": (False, None),
        },
        writes={"attention_dropout": 0.0, **_ROUTER},
        also={"num_experts": ("num_local_experts",)},
    ),
    "qwen3_moe": _like(
        _LLAMA,
        names={**_MOE, "moe_ffn_hidden_size": "moe_intermediate_size", "norm_topk_prob": "norm_topk_prob"},
        defaults={"num_experts": 128, "experts_per_token": 8, "norm_topk_prob": False},
        only={"attention_bias": False, "mlp_only_layers": ([], None), "decoder_sparse_step": 1},
        writes={"attention_dropout": 0.0, **_ROUTER},
        also={"num_experts": ("num_local_experts",)},  # as transformers 5 writes it
    ),
    "deepseek_v2": _like(
        _DEEPSEEK, defaults={"num_shared_experts": 2}, only={**_DEEPSEEK.only, "scoring_func": "softmax"}
    ),
    "deepseek_v3": _like(
        _DEEPSEEK,
        defaults={
            "num_shared_experts": 1,
            "first_dense_layers": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "router_groups": 8,
            "router_top_groups": 4,
        },
        only={
            **_DEEPSEEK.only,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_interleave": (True, None),
        },
        also={"n_routed_experts": ("num_local_experts",)},
    ),
    "glm4_moe": _like(
        _LLAMA,
        names=_DEEPSEEK_EXPERTS,
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "norm_eps": 1e-5,
            "num_shared_experts": 1,
            "first_dense_layers": 1,
            "norm_topk_prob": True,
        },
        only={},
        writes={"attention_dropout": 0.0, **_ROUTER},
        also={"n_routed_experts": ("num_local_experts",)},
        partial_rotary_factor=0.5,
    ),
    "minimax_m2": _like(
        _LLAMA,
        names={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults={"num_experts": 256, "experts_per_token": 8},
        only={
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": (0, None),
        },
        writes={"attention_dropout": 0.0, "router_jitter_noise": 0.0, **_ROUTER},
        also={"num_local_experts": ("num_experts",)},
        rope_theta=5_000_000.0,
    ),
    "gpt_oss": _like(
        _LLAMA,
        names={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok", **_WINDOW},
        defaults={"norm_eps": 1e-5, "experts_per_token": 4, "sliding_window": 128},
        only={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        writes={"attention_dropout": 0.0, **_ROUTER},
        also={"num_local_experts": ("num_experts",), "num_experts_per_tok": ("experts_per_token",)},
        rope_theta=150_000.0,
        full_attention_every=2,
    ),
    "t5": Keys(
        names={
            "num_layers": "num_decoder_layers",
            "encoder_layers": "num_layers",
            "hidden_size": "d_model",
            "ffn_hidden_size": "d_ff",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
            "vocab_size": "vocab_size",
            # Relative positions have no limit; n_positions is the training length of the first versions.
            "max_position_embeddings": "n_positions",
            "tied_embeddings": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "relative_attention_buckets": "relative_attention_num_buckets",
            "relative_attention_max_distance": "relative_attention_max_distance",
            "feed_forward_proj": "feed_forward_proj",
        },
        defaults={
            "head_dim": 64,
            "max_position_embeddings": 512,
            "tied_embeddings": True,
            "norm_eps": 1e-6,
            "relative_attention_buckets": 32,
            "relative_attention_max_distance": 128,
            "feed_forward_proj": "relu",
        },
        only={"feed_forward_proj": ("relu", "gated-gelu")},  # of the first version, and of version 1.1
        writes={"dropout_rate": 0.0},
        also={"num_decoder_layers": ("num_layers",)},
        activation=None,
    ),
    "bart": _like(_BART, writes={**_BART.writes, "decoder_start_token_id": None}),
    "blenderbot": _BART,  # its class insists on a number for decoder_start_token_id
}

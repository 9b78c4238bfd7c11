"""Keys of ``config.json`` that need code of their own in some families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kit.errors import SpecError
from kit.specs.model import ModelSpec
from kit.specs.text import shown


def _read_falcon(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Boolean keys decide key/value heads, norms and positions (modeling_falcon.py, FalconAttention)."""
    new, parallel = bool(config.get("new_decoder_architecture")), data["parallel_residual"]
    heads = data["num_attention_heads"]
    if new and not parallel:
        raise SpecError(
            f"new_decoder_architecture=True with parallel_attn=False of {name} has no norms to read; use either alone"
        )
    old = 1 if config.get("multi_query", True) else heads
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    return {
        "num_key_value_heads": (config.get("num_kv_heads") or heads) if new else old,
        "shared_norm": parallel and norms == 1,
        **({"biases": "all"} if config.get("bias") else {}),
        **({"positions": "alibi", "rope_theta": None, "rope_scaling": None} if config.get("alibi") else {}),
    }


def _write_falcon(model: ModelSpec) -> dict[str, Any]:
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    new = model.parallel_residual and (not model.shared_norm or groups not in (1, heads))
    if not new and groups not in (1, heads):
        raise SpecError(
            f"num_key_value_heads={groups} of {model.name}: Falcon without parallel_residual has 1 or all {heads}; "
            "use one of these"
        )
    return {
        "new_decoder_architecture": new,
        "multi_query": groups == 1,
        "num_kv_heads": groups,
        "num_ln_in_parallel_attn": (1 if model.shared_norm else 2) if new else None,
        "bias": model.linear_bias,
        "alibi": model.traits.positions == "alibi",
    }


def _read_deepseek(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Greedy routing ignores expert groups (modeling_deepseek_v2.py, route_tokens_to_experts)."""
    latent = data["latent"]
    widths = latent["nope_head_dim"], latent["rope_head_dim"]
    if not all(isinstance(width, int) for width in widths):
        raise SpecError(
            f"qk_nope_head_dim={shown(widths[0])}, qk_rope_head_dim={shown(widths[1])} of {name} are not whole numbers"
        )
    greedy = config["model_type"] == "deepseek_v2" and config.get("topk_method", "greedy") == "greedy"
    return {
        "head_dim": sum(widths),
        "num_key_value_heads": data["num_attention_heads"],
        **({"router_groups": 1, "router_top_groups": 1} if greedy else {}),
    }


def _write_deepseek_v2(model: ModelSpec) -> dict[str, Any]:
    return {"topk_method": "greedy" if model.router_groups == 1 else "group_limited_greedy"}


def _write_phi3(model: ModelSpec) -> dict[str, Any]:
    """Writes the original context length also at the top level, where modeling_phi3.py reads it."""
    original = (model.rope_scaling or {}).get("original_max_position_embeddings", model.max_position_embeddings)
    return {"original_max_position_embeddings": original}


def _read_smollm3(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The list of layers (1 has RoPE, 0 has none), if present, takes precedence over the interval."""
    rotated = config.get("no_rope_layers")
    if rotated is None:
        return {}
    layers, every = data["num_layers"], 0
    if isinstance(rotated, list) and isinstance(layers, int) and len(rotated) >= layers:
        rotated = rotated[:layers]
        every = rotated.index(0) + 1 if 0 in rotated else 0
        if rotated == [int(not every or (layer + 1) % every != 0) for layer in range(layers)]:
            return {"no_rope_every": every}
    raise SpecError(
        f"no_rope_layers={shown(rotated)} of {name}: layers without positions come in equal steps here; use a model "
        "with no_rope_layer_interval alone"
    )


def _write_smollm3(model: ModelSpec) -> dict[str, Any]:
    return {
        "no_rope_layer_interval": model.no_rope_every or model.num_layers + 1,
        "no_rope_layers": [int(model.rotates(layer)) for layer in range(model.num_layers)],
    }


def _read_granite(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Scores are multiplied by attention_multiplier, which equals 1/√query_pre_attn_scalar."""
    multiplier = config.get("attention_multiplier", 1.0)
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
        raise SpecError(f"attention_multiplier={shown(multiplier)} of {name} is no number; give one")
    scalar = round(multiplier**-2) if 2**-12 <= multiplier <= 1 else 0
    if not scalar or abs(scalar**-0.5 / multiplier - 1) > 1e-9:
        raise SpecError(
            f"attention_multiplier={multiplier} of {name}: here it is one over the root of a whole number up to 2²⁴; "
            f"use {max(scalar, 1) ** -0.5}"
        )
    return {"query_pre_attn_scalar": scalar}


def _write_granite(model: ModelSpec) -> dict[str, Any]:
    assert model.query_pre_attn_scalar is not None
    return {"attention_multiplier": model.query_pre_attn_scalar**-0.5}


def _read_qwen2_moe(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The model has one shared expert, with the width of several routed experts."""
    shared, one = config.get("shared_expert_intermediate_size", 5632), data["moe_ffn_hidden_size"]
    if not (isinstance(shared, int) and isinstance(one, int)) or min(shared, one) < 1 or shared % one:
        raise SpecError(
            f"shared_expert_intermediate_size={shown(shared)} of {name} is no multiple of "
            f"moe_intermediate_size={shown(one)}, as it is here; use a model where it is"
        )
    return {"num_shared_experts": shared // one}


def _read_glm4_moe(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Two boolean keys decide biases of query, key and value, and norms of queries and keys."""
    return {
        **({"biases": "qkv"} if config.get("attention_bias") else {}),
        **({"qk_norm": "head"} if config.get("use_qk_norm") else {}),
    }


def _read_minimax_m2(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Files state the number of rotated dimensions of a head (configuration_minimax_m2.py)."""
    rotated, head_dim = config.get("rotary_dim"), data["head_dim"]
    if rotated is None:
        return {}
    if not (isinstance(rotated, int) and isinstance(head_dim, int)) or not 0 < rotated <= head_dim:
        raise SpecError(
            f"rotary_dim={shown(rotated)} of {name} is no part of head_dim={shown(head_dim)}; use a whole number that "
            "is no larger"
        )
    return {"partial_rotary_factor": rotated / head_dim}


def _read_t5(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Version 1.1 has an untied head, and config files say so. transformers reads the key as "no scaling" and ties the
    head by the tensors that it finds (configuration_t5.py, __post_init__)."""
    return {"tied_embeddings": data["tied_embeddings"] and config.get("scale_decoder_outputs", True)}


def _read_bart(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key, ours in (("ffn_dim", data["ffn_hidden_size"]), ("attention_heads", data["num_attention_heads"])):
        if (theirs := config.get(f"decoder_{key}")) != ours:
            raise SpecError(
                f"encoder_{key}={shown(ours)} and decoder_{key}={shown(theirs)} of {name}: stacks of one width are "
                "computed here; use a model whose encoder and decoder are alike"
            )
    return {}


def _write_bart(model: ModelSpec) -> dict[str, Any]:
    return {"decoder_ffn_dim": model.ffn_hidden_size, "decoder_attention_heads": model.num_attention_heads}


READ: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]]] = {
    "falcon": _read_falcon,
    "deepseek_v2": _read_deepseek,
    "deepseek_v3": _read_deepseek,
    "smollm3": _read_smollm3,
    "granite": _read_granite,
    "qwen2_moe": _read_qwen2_moe,
    "glm4_moe": _read_glm4_moe,
    "minimax_m2": _read_minimax_m2,
    "t5": _read_t5,
    "bart": _read_bart,
    "blenderbot": _read_bart,
}
WRITE: Mapping[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "falcon": _write_falcon,
    "deepseek_v2": _write_deepseek_v2,
    "phi3": _write_phi3,
    "smollm3": _write_smollm3,
    "granite": _write_granite,
    "qwen2_moe": lambda model: {"shared_expert_intermediate_size": model.shared_ffn_hidden_size},
    "glm4_moe": lambda model: {"attention_bias": model.qkv_bias, "use_qk_norm": model.traits.qk_norm == "head"},
    "bart": _write_bart,
    "blenderbot": _write_bart,
}

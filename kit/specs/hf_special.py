"""What three families say in their ``config.json`` in a way of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kit.errors import SpecError
from kit.specs.model import ModelSpec
from kit.specs.text import shown


def _read_falcon(config: Mapping[str, Any], data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Key/value heads, norms and positions follow from switches (modeling_falcon.py, FalconAttention)."""
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
    """Greedy routing does not look at groups (modeling_deepseek_v2.py, route_tokens_to_experts)."""
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
    """The length before scaling stands beside the scaling as well (modeling_phi3.py reads it there)."""
    original = (model.rope_scaling or {}).get("original_max_position_embeddings", model.max_position_embeddings)
    return {"original_max_position_embeddings": original}


READ: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]]] = {
    "falcon": _read_falcon,
    "deepseek_v2": _read_deepseek,
    "deepseek_v3": _read_deepseek,
}
WRITE: Mapping[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "falcon": _write_falcon,
    "deepseek_v2": _write_deepseek_v2,
    "phi3": _write_phi3,
}

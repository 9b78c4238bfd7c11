"""``config.json`` of a model type that no family describes → an approximate ModelSpec.

Sizes are read under their usual key names. transformers counts the parameters (``kit/specs/counting.py``); without
transformers they are estimated from the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.families import FAMILIES
from kit.specs.hf_keys import SPELLINGS
from kit.specs.model import ModelSpec
from kit.specs.text import listed, shown

_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embedding_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "d_kv", "v_head_dim"),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk"),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert"),
    "first_dense_layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "sliding_window": ("sliding_window", "attention_window_size", "sliding_window_size"),
}
"""Field of ModelSpec → keys, the most usual first."""
_OF_EXPERTS = ("num_experts", "experts_per_token", "moe_ffn_hidden_size", "num_shared_experts", "first_dense_layers")
_MOST = 2**24
_LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "M", "m")
"""Names of recurrent layers in configurations."""
CODE_OF_A_REPOSITORY = "auto_map"
"""Key in configurations of models whose code is in their own repository."""


def approximated(config: Mapping[str, Any], answer: Mapping[str, Any] | None, name: str, source: str) -> ModelSpec:
    """The approximate ModelSpec of a ``config.json``. ``answer``: of ``kit.specs.counting``; None without transformers.

    Raises ``SpecError`` if transformers cannot build the model, and for sizes that are missing or impossible.
    """
    kind = config["model_type"]
    if answer is not None and "refused" in answer:
        raise SpecError(_refusal(config, name, answer))
    found = dict(config) if answer is None else answer["sizes"]
    sizes = _sizes(found, name)
    known = _estimated(found, sizes) if answer is None else _as_counted(answer, sizes)
    window = sizes.pop("sliding_window")
    layers = _kinds(found, sizes["num_layers"])
    windowed = sum("sliding" in each or "local" in each or each == "chunked_attention" for each in layers)
    attention = known["attention_layers"]
    known |= _state(found, sizes["hidden_size"]) if known["recurrent_layers"] else {}
    known |= {
        "config": dict(config) if answer is None else answer["config"],
        "windowed_layers": 0 if window is None else min(attention, windowed if layers else attention),
        **_activation(found),
    }
    data = {
        **sizes,
        "name": name,
        "family": "transformers",
        "sliding_window": window,
        "attention_softcap": found.get("attn_logit_softcapping"),
        "logit_softcap": found.get("final_logit_softcapping"),
        "tied_embeddings": bool(found.get("tie_word_embeddings")) if answer is None else answer["tied"],
        "rope_theta": None,
        "approximate": known,
        "source": f"{source}, model_type {kind}",
    }
    return strict_yaml.parse(ModelSpec, data, strict_yaml.Document(name=f"config.json of {name}", data={}, lines={}))


def _refusal(config: Mapping[str, Any], name: str, answer: Mapping[str, Any]) -> str:
    kind, why = config["model_type"], str(answer["refused"])
    if why == "unknown" and CODE_OF_A_REPOSITORY in config:
        return (
            f"model_type={shown(kind)} of {name} is code in its repository ({CODE_OF_A_REPOSITORY}), which never runs "
            "here; use a version of transformers that has the type, or describe the shape with the nearest family"
        )
    if why == "unknown":
        return (
            f"model_type={shown(kind)} of {name} is not known to the installed transformers; a newer version may know "
            f"it. Described without it are {listed(FAMILIES)}: a shape of your own takes the nearest"
        )
    if why == "no causal language model":
        inner = answer.get("model_type")
        part = f"its text part {shown(inner)}" if inner != kind else "it"
        return (
            f"model_type={shown(kind)} of {name}: {part} is no causal language model of transformers, and other models "
            "are not trained here; use a decoder, or the text model that it was made from"
        )
    return f"transformers refuses config.json of {name} (model_type {shown(kind)}): {shown(why, str)}; correct the file"


def _first(config: Mapping[str, Any], field: str) -> Any:
    values = (config.get(key) for key in _NAMES[field])
    value = next((value for value in values if value is not None), None)
    # Of a list for all layers the largest: memory is asked for before it is known which layer comes first.
    return max(value, default=None) if isinstance(value, list) and all(type(v) is int for v in value) else value


def _sizes(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields of ModelSpec; missing keys get the values that most configurations mean."""
    sizes = {field: _first(config, field) for field in _NAMES}
    for field in ("hidden_size", "num_layers", "vocab_size"):
        if sizes[field] is None:
            raise SpecError(f"config.json of {name} lacks {' or '.join(_NAMES[field][:2])}; correct the file")
        _check(sizes[field], field, name)
    hidden = sizes["hidden_size"]
    sizes |= {
        "num_attention_heads": sizes["num_attention_heads"] or max(1, hidden // 64),
        "ffn_hidden_size": sizes["ffn_hidden_size"] or sizes["moe_ffn_hidden_size"] or 4 * hidden,
        "max_position_embeddings": sizes["max_position_embeddings"] or 2**20,  # positions without an end
        "sliding_window": sizes["sliding_window"] or None,
    }
    _check(sizes["num_attention_heads"], "num_attention_heads", name)
    return sizes | _heads(config, sizes) | _experts(config, sizes)


def _heads(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    latent: dict[str, Any] = {field: config.get(key) for field, key in _LATENT.items()}
    if all(type(value) is int and value > 0 for value in latent.values()):
        width = latent["nope_head_dim"] + latent["rope_head_dim"]
        latent["q_lora_rank"] = config.get("q_lora_rank") or None
        return {"latent": latent, "head_dim": width, "num_key_value_heads": heads}
    groups = 1 if config.get("multi_query") else sizes["num_key_value_heads"] or heads
    uneven = type(groups) is int and groups > 0 and heads % groups != 0
    width = sizes["head_dim"] or max(1, sizes["hidden_size"] // heads)
    return {"head_dim": width, "num_key_value_heads": heads if uneven else groups}


def _experts(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    number = sizes["num_experts"] or 0
    if type(number) is int and number <= 1:
        return dict.fromkeys(_OF_EXPERTS, 0)
    shared = sizes["num_shared_experts"] or int(bool(config.get("shared_expert_intermediate_size")))
    return {
        "num_experts": number,
        "experts_per_token": sizes["experts_per_token"] or 1,
        "moe_ffn_hidden_size": sizes["moe_ffn_hidden_size"] or sizes["ffn_hidden_size"],
        "num_shared_experts": shared,
        "first_dense_layers": sizes["first_dense_layers"] or 0,
    }


def _check(value: Any, field: str, name: str) -> None:
    if type(value) is not int or not 0 < value <= _MOST:
        raise SpecError(
            f"{field}={shown(value)} of {name} should be a whole number from 1 to {_MOST}; correct the file"
        )


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer, if the configuration lists it."""
    for key in ("layer_types", "layers_block_type", "block_types", "layers_types"):
        if isinstance(listed := config.get(key), list) and listed:
            return [str(listed[index % len(listed)]) for index in range(layers)]
    every = config.get("full_attention_interval") or config.get("attn_layer_period")
    if type(every) is int and every > 1:
        return ["full_attention" if (index + 1) % every == 0 else "mamba" for index in range(layers)]
    return []


def _as_counted(answer: Mapping[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Fields of Approximation from transformers' count; also corrects ``sizes`` by the count."""
    layers = sizes["num_layers"] = answer["layers"] or sizes["num_layers"]
    hidden, known = sizes["hidden_size"], {"counted": True, **answer["traits"]}
    known |= {key: answer[key] for key in ("parameters", "tables", "matrices", "recurrent", "experts")}
    known |= {key: min(layers, answer[key]) for key in ("attention_layers", "recurrent_layers", "mlp_layers")}
    with_experts = answer["experts_layers"]
    # Gate, up and down, or two of them: whichever gives the width that the configuration says.
    dense = answer["mlp_layers"] * hidden * sizes["ffn_hidden_size"]
    width = answer["mlp"] / dense if dense else 3.0
    if not with_experts:
        sizes |= dict.fromkeys(_OF_EXPERTS, 0)
    elif sizes["num_experts"]:
        a_matrix = answer["experts"] / (with_experts * sizes["num_experts"] * hidden)
        width = 3.0 if abs(a_matrix / sizes["moe_ffn_hidden_size"] - 2) > 0.3 else 2.0
        sizes["moe_ffn_hidden_size"] = max(1, round(a_matrix / width))
        sizes["first_dense_layers"] = max(0, layers - with_experts)
    known["gated_mlp"] = width > 2.5
    return known


def _estimated(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Approximation without transformers. Assumes Llama's matrices (two in the MLP if norms are LayerNorm),
    and three matrices of the state's width in recurrent layers."""
    hidden, layers, heads = sizes["hidden_size"], sizes["num_layers"], sizes["num_attention_heads"]
    kinds = _kinds(config, layers)
    recurrent = sum(kind in _RECURRENT for kind in kinds)
    dense = min(layers, sizes["first_dense_layers"]) if sizes["num_experts"] else layers
    if latent := sizes.get("latent"):
        query = heads * sizes["head_dim"]
        rank = latent["q_lora_rank"]
        attention = hidden * query if rank is None else rank * (hidden + query)
        attention += hidden * (latent["kv_lora_rank"] + latent["rope_head_dim"])
        attention += latent["kv_lora_rank"] * heads * (latent["nope_head_dim"] + latent["value_head_dim"])
        attention += heads * latent["value_head_dim"] * hidden
    else:
        attention = 2 * hidden * sizes["head_dim"] * (heads + sizes["num_key_value_heads"])
    classic = any(key in config for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"))
    mlp = (2 if classic else 3) * hidden
    state = 3 * hidden * max(hidden, _state(config, hidden)["state_width"])
    experts = (layers - dense) * sizes["num_experts"] * mlp * sizes["moe_ffn_hidden_size"]
    shared = (layers - dense) * sizes["num_shared_experts"] * mlp * sizes["moe_ffn_hidden_size"]
    matrices = (layers - recurrent) * attention + recurrent * state + shared
    matrices += dense * mlp * sizes["ffn_hidden_size"] + (layers - dense) * sizes["num_experts"] * hidden
    tables = sizes["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return {
        "counted": False,
        "norm": "layernorm" if classic else "rmsnorm",
        "gated_mlp": not classic,
        "fused_attention": not config.get("attn_logit_softcapping"),
        "parameters": tables + matrices + experts + (2 * layers + 1) * hidden,
        "tables": tables,
        "matrices": matrices,
        "recurrent": recurrent * state,
        "experts": experts,
        "attention_layers": layers - recurrent,
        "recurrent_layers": recurrent,
        "mlp_layers": dense,
    }


def _state(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
    """Elements of a recurrent layer's state, and of a token's keys and values.

    Linear attention: heads times the widths of key and value (gated delta rule, arXiv 2412.06464). Mamba: inner width
    times the state size of a channel (arXiv 2312.00752, 2405.21060). Convolution: its taps.
    """
    inner = config.get("linear_attn_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config  # Kimi Linear

    def size(*keys: str) -> int:
        return next((value for key in keys if type(value := config.get(key)) is int and value > 0), 0)

    if heads := size("linear_num_value_heads"):
        keys, values = size("linear_key_head_dim"), size("linear_value_head_dim")
        return {"state": heads * keys * values, "state_width": heads * (keys + values)}
    if channel := size("mamba_d_state", "ssm_state_size", "state_size", "mamba_ssm_state_size"):
        heads, width = size("mamba_n_heads", "mamba_num_heads"), size("mamba_d_head", "mamba_head_dim")
        wide = heads * width or size("mamba_expand", "expand") * hidden or hidden
        return {"state": wide * channel, "state_width": wide + (heads or 1) * channel}
    if taps := size("conv_L_cache", "lru_width"):
        return {"state": hidden * taps if "conv_L_cache" in config else taps, "state_width": 0}
    heads = size("num_heads", "num_attention_heads", "attention_hidden_size") or 1
    width = size("head_dim", "v_head_dim") or hidden // heads
    return {"state": heads * width * width, "state_width": 2 * heads * width}


def _activation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Traits of the activation; an unknown activation counts as silu."""
    keys = ("hidden_act", "activation_function", "hidden_activation", "activation", "mlp_hidden_act")
    named = next((config[key] for key in keys if config.get(key)), "")
    activation = next((activation for activation, names in SPELLINGS.items() if named in names), "silu")
    return {"activation": activation, "eager_gelu": named == "gelu_new"}

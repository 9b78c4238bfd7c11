"""``config.json`` of T5, BART and Blenderbot ↔ a ModelSpec. Read in transformers 5.23 (``configuration_*.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import SpecError
from kit.specs.model import ModelSpec
from kit.specs.text import shown

_T5_PROJECTIONS = ("relu", "gated-gelu")
"""feed_forward_proj of T5's first version and of version 1.1."""


def fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields of ModelSpec, without name and source. Raises ``SpecError`` for features that kit does not support."""
    return _t5(config, name) if config["model_type"] == "t5" else _bart_like(config, name)


def config(model: ModelSpec) -> dict[str, Any]:
    """ModelSpec → the keys of a ``config.json``, ``model_type`` among them; dropout is off."""
    if model.family == "t5":
        return {
            "model_type": "t5",
            "vocab_size": model.vocab_size,
            "d_model": model.hidden_size,
            "d_kv": model.head_dim,
            "d_ff": model.ffn_hidden_size,
            "num_layers": model.encoder_layers,
            "num_decoder_layers": model.num_layers,
            "num_heads": model.num_attention_heads,
            "relative_attention_num_buckets": model.relative_attention_buckets,
            "relative_attention_max_distance": model.relative_attention_max_distance,
            "feed_forward_proj": model.feed_forward_proj,
            "layer_norm_epsilon": model.norm_eps,
            "tie_word_embeddings": model.tied_embeddings,
            "n_positions": model.max_position_embeddings,
            "dropout_rate": 0.0,
        }
    if model.norm_eps != 1e-5:
        raise SpecError(f"norm_eps={model.norm_eps} of {model.name}: {model.family} has no choice of it; use 1e-5")
    own = {"bart": {"decoder_start_token_id": None}, "blenderbot": {}}  # Blenderbot's class insists on a number
    return {
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.num_layers,
        "encoder_ffn_dim": model.ffn_hidden_size,
        "decoder_ffn_dim": model.ffn_hidden_size,
        "encoder_attention_heads": model.num_attention_heads,
        "decoder_attention_heads": model.num_attention_heads,
        "d_model": model.hidden_size,
        "scale_embedding": model.scale_embedding,
        "tie_word_embeddings": model.tied_embeddings,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "forced_eos_token_id": None,
        **own[model.family],
    }


def _t5(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    encoder = _required(config, "num_layers", name)
    projection = config.get("feed_forward_proj", "relu")
    if projection not in _T5_PROJECTIONS:
        raise SpecError(
            f"feed_forward_proj={shown(projection)} of {name} is not computed here; only relu and gated-gelu are"
        )
    heads = _required(config, "num_heads", name)
    # Version 1.1 has an untied head, and config files say so. transformers reads the key as "no scaling" and ties the
    # head by the tensors that it finds (configuration_t5.py, __post_init__).
    tied = config.get("tie_word_embeddings", True) and config.get("scale_decoder_outputs", True)
    return {
        "family": "t5",
        "num_layers": config.get("num_decoder_layers") or encoder,
        "encoder_layers": encoder,
        "hidden_size": _required(config, "d_model", name),
        "ffn_hidden_size": _required(config, "d_ff", name),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _required(config, "d_kv", name),
        "vocab_size": _required(config, "vocab_size", name),
        # Relative positions have no limit; n_positions is the training length of the first versions.
        "max_position_embeddings": config.get("n_positions", 512),
        "tied_embeddings": tied,
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "rope_theta": None,
        "relative_attention_buckets": config.get("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": config.get("relative_attention_max_distance", 128),
        "feed_forward_proj": projection,
    }


def _bart_like(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    if config.get("activation_function", "gelu") != "gelu":
        raise SpecError(
            f"activation_function={shown(config['activation_function'])} of {name} is not computed here; gelu is"
        )
    for key in ("ffn_dim", "attention_heads"):
        ours, theirs = (_required(config, f"{stack}_{key}", name) for stack in ("encoder", "decoder"))
        if ours != theirs:
            raise SpecError(
                f"encoder_{key}={shown(ours)} and decoder_{key}={shown(theirs)} of {name}: stacks of one width are "
                "computed here; use a model whose encoder and decoder are alike"
            )
    hidden, heads = _required(config, "d_model", name), _required(config, "encoder_attention_heads", name)
    if not (isinstance(hidden, int) and isinstance(heads, int)) or heads < 1 or hidden % heads:
        raise SpecError(f"config.json of {name}: {shown(heads)} attention heads do not divide d_model={shown(hidden)}")
    return {
        "family": config["model_type"],
        "num_layers": _required(config, "decoder_layers", name),
        "encoder_layers": _required(config, "encoder_layers", name),
        "hidden_size": hidden,
        "ffn_hidden_size": _required(config, "encoder_ffn_dim", name),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": _required(config, "vocab_size", name),
        "max_position_embeddings": _required(config, "max_position_embeddings", name),
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "norm_eps": 1e-5,  # torch's default; no key changes it
        "rope_theta": None,
        "scale_embedding": config.get("scale_embedding", False),
    }


def _required(config: Mapping[str, Any], key: str, name: str) -> Any:
    if config.get(key) is None:
        raise SpecError(f"config.json of {name} lacks {key}")
    return config[key]

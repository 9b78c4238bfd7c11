"""Encoder-decoder models: transformers' configurations of T5, BART and Blenderbot from a ModelSpec."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from transformers import BartConfig, BlenderbotConfig, PreTrainedConfig, T5Config, T5ForConditionalGeneration

from kit.errors import SpecError
from kit.specs.model import ModelSpec


def config(model: ModelSpec) -> PreTrainedConfig:
    """Of the family's class. Raises SpecError where it cannot take the shape."""
    return {"t5": t5, "bart": bart, "blenderbot": blenderbot}[model.family](model)


def t5(model: ModelSpec) -> T5Config:
    """T5 (tied head, scaled outputs) or 1.1 (a head of its own, outputs as they are)."""
    _no_grouped_queries(model)
    config = T5Config(
        vocab_size=model.vocab_size,
        d_model=model.hidden_size,
        d_kv=model.head_dim,
        d_ff=model.ffn_hidden_size,
        num_layers=model.encoder_layers,
        num_decoder_layers=model.num_layers,
        num_heads=model.num_attention_heads,
        relative_attention_num_buckets=model.relative_attention_buckets,
        relative_attention_max_distance=model.relative_attention_max_distance,
        feed_forward_proj=model.feed_forward_proj,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tied_embeddings,
        dropout_rate=0.0,
        n_positions=model.max_position_embeddings,
        pad_token_id=None,
        eos_token_id=None,
    )
    # T5Config sets it true whatever it is given, and scales outputs by what it was given (configuration_t5.py).
    config.tie_word_embeddings = model.tied_embeddings
    return config


class UntiedT5(T5ForConditionalGeneration):
    """T5 1.1. The class of transformers ties head and embedding unless it finds both on disk, and with
    tie_word_embeddings=false it parts the two stacks' embeddings too (modeling_t5.py, _tied_weights_keys)."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: T5Config) -> None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = True
        super().__init__(config)


def bart(model: ModelSpec) -> BartConfig:
    """BART: norms after each block."""
    return BartConfig(**_shared(model), forced_eos_token_id=None)


def blenderbot(model: ModelSpec) -> BlenderbotConfig:
    """Blenderbot: norms before each block, and one at the end of each stack."""
    settings = _shared(model)
    del settings["decoder_start_token_id"]  # the class insists on a number
    return BlenderbotConfig(**settings, forced_eos_token_id=None)


def _shared(model: ModelSpec) -> dict[str, Any]:
    _no_grouped_queries(model)
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        raise SpecError(
            f"head_dim={model.head_dim} for {model.name}: the heads of {model.family} split the hidden size "
            f"{model.hidden_size} evenly; use {model.hidden_size // model.num_attention_heads}"
        )
    return {
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
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": None,
    }


def _no_grouped_queries(model: ModelSpec) -> None:
    if model.num_key_value_heads != model.num_attention_heads:
        raise SpecError(
            f"num_key_value_heads={model.num_key_value_heads} for {model.name}: {model.family} has no grouped-query "
            f"attention; use {model.num_attention_heads}"
        )

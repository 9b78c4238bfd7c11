"""GPT-NeoX (Pythia): LayerNorm, biases everywhere; query, key and value of a head adjoin, as Megatron has them."""

from __future__ import annotations

from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.sharding import Replicated, Rule, Sliced, Vocabulary
from kit.specs.model import ModelSpec

_LAYER = "decoder.layers.{layer}."
_BLOCK = "gpt_neox.layers.{layer}."


def entries(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    output = "output_layer.weight"
    embedding = Entry(
        "embedding.word_embeddings.weight",
        ("gpt_neox.embed_in.weight",),
        Vocabulary(),
        copy=output if model.tied_embeddings else None,
    )
    untied = () if model.tied_embeddings else (Entry(output, ("embed_out.weight",), Vocabulary()),)
    return (
        embedding,
        *_pair(_LAYER + "input_layernorm", _BLOCK + "input_layernorm", Replicated(), Replicated()),
        *_pair(_LAYER + "self_attention.linear_qkv", _BLOCK + "attention.query_key_value", Sliced(0), Sliced(0)),
        *_pair(_LAYER + "self_attention.linear_proj", _BLOCK + "attention.dense", Sliced(1), Replicated()),
        *_pair(_LAYER + "pre_mlp_layernorm", _BLOCK + "post_attention_layernorm", Replicated(), Replicated()),
        *_pair(_LAYER + "mlp.linear_fc1", _BLOCK + "mlp.dense_h_to_4h", Sliced(0), Sliced(0)),
        *_pair(_LAYER + "mlp.linear_fc2", _BLOCK + "mlp.dense_4h_to_h", Sliced(1), Replicated()),
        *_pair("decoder.final_layernorm", "gpt_neox.final_layer_norm", Replicated(), Replicated()),
        *untied,
    )


def _pair(megatron: str, hugging_face: str, weight: Rule, bias: Rule) -> tuple[Entry, Entry]:
    return (
        Entry(f"{megatron}.weight", (f"{hugging_face}.weight",), weight),
        Entry(f"{megatron}.bias", (f"{hugging_face}.bias",), bias),
    )

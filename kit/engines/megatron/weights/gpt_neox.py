"""GPT-NeoX (Pythia): LayerNorm, biases everywhere; query, key and value interleaved per head, as in Megatron."""

from __future__ import annotations

from kit.engines.megatron.weights.mapping import ParamMapping, embedding_and_head, weight_and_bias
from kit.engines.megatron.weights.sharding import ColumnParallel, Replicated, RowParallel
from kit.specs.model import ModelSpec

_LAYER = "decoder.layers.{layer}."
_BLOCK = "gpt_neox.layers.{layer}."


def gpt_neox(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """The weight map of GPT-NeoX."""
    embedding, *head = embedding_and_head(model, "gpt_neox.embed_in.weight", "embed_out.weight")
    attention, mlp = _LAYER + "self_attention.", _LAYER + "mlp."
    return (
        embedding,
        *weight_and_bias(_LAYER + "input_layernorm", _BLOCK + "input_layernorm", Replicated()),
        *weight_and_bias(attention + "linear_qkv", _BLOCK + "attention.query_key_value", ColumnParallel()),
        *weight_and_bias(attention + "linear_proj", _BLOCK + "attention.dense", RowParallel(), Replicated()),
        *weight_and_bias(_LAYER + "pre_mlp_layernorm", _BLOCK + "post_attention_layernorm", Replicated()),
        *weight_and_bias(mlp + "linear_fc1", _BLOCK + "mlp.dense_h_to_4h", ColumnParallel()),
        *weight_and_bias(mlp + "linear_fc2", _BLOCK + "mlp.dense_4h_to_h", RowParallel(), Replicated()),
        *weight_and_bias("decoder.final_layernorm", "gpt_neox.final_layer_norm", Replicated()),
        *head,
    )

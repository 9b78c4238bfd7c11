"""GPT-2: LayerNorm, biases everywhere, learned positions; weights are stored transposed on disk (Conv1D)."""

from __future__ import annotations

from kit.engines.megatron.weights.mapping import ParamMapping, embedding_and_head, weight_and_bias
from kit.engines.megatron.weights.sharding import (
    QKV,
    ColumnParallel,
    ConcatenatedRows,
    Replicated,
    RowParallel,
    Sharding,
    Transposed,
)
from kit.specs.model import ModelSpec

_LAYER = "decoder.layers.{layer}."
_BLOCK = "transformer.h.{layer}."


def gpt2(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """The weight map of GPT-2."""
    qkv = ConcatenatedRows(QKV(), (model.hidden_size,) * 3)
    embedding, *head = embedding_and_head(model, "transformer.wte.weight", "lm_head.weight")
    return (
        embedding,
        ParamMapping("embedding.position_embeddings.weight", ("transformer.wpe.weight",), Replicated()),
        *weight_and_bias(_LAYER + "input_layernorm", _BLOCK + "ln_1", Replicated()),
        *_linear("self_attention.linear_qkv", "attn.c_attn", qkv, qkv),
        *_linear("self_attention.linear_proj", "attn.c_proj", RowParallel(), Replicated()),
        *weight_and_bias(_LAYER + "pre_mlp_layernorm", _BLOCK + "ln_2", Replicated()),
        *_linear("mlp.linear_fc1", "mlp.c_fc", ColumnParallel(), ColumnParallel()),
        *_linear("mlp.linear_fc2", "mlp.c_proj", RowParallel(), Replicated()),
        *weight_and_bias("decoder.final_layernorm", "transformer.ln_f", Replicated()),
        *head,
    )


def _linear(megatron: str, hugging_face: str, weight: Sharding, bias: Sharding) -> tuple[ParamMapping, ParamMapping]:
    return weight_and_bias(_LAYER + megatron, _BLOCK + hugging_face, Transposed(weight), bias)

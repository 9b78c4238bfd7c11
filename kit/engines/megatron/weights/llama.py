"""Llama and the families that differ from it in few parameters.

Llama has RMSNorm, rotary positions, grouped-query attention without biases, and a gated MLP.
"""

from __future__ import annotations

from kit.engines.megatron.weights.mapping import ParamMapping, embedding_and_head
from kit.engines.megatron.weights.sharding import (
    QKV,
    ColumnParallel,
    ConcatenatedRows,
    Replicated,
    RowParallel,
    Sharding,
)
from kit.specs.model import ModelSpec

_MEGATRON, _BLOCK = "decoder.layers.{layer}.", "model.layers.{layer}."


def in_layer(megatron: str, *hugging_face: str, sharding: Sharding) -> ParamMapping:
    """Mapping of a parameter of every layer. Names are relative to the layer."""
    return ParamMapping(_MEGATRON + megatron, tuple(_BLOCK + name for name in hugging_face), sharding)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LAYER = (
    in_layer("input_layernorm.weight", "input_layernorm.weight", sharding=Replicated()),
    in_layer("self_attention.linear_qkv.weight", *(f"{name}.weight" for name in _QKV), sharding=QKV()),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", sharding=RowParallel()),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", sharding=Replicated()),
    in_layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", sharding=ColumnParallel()),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", sharding=RowParallel()),
)
WITHOUT_MLP = tuple(mapping for mapping in LAYER if ".mlp." not in mapping.megatron)
QKV_BIAS = in_layer("self_attention.linear_qkv.bias", *(f"{name}.bias" for name in _QKV), sharding=QKV())
QK_NORMS, WIDTH_NORMS = (
    tuple(
        in_layer(f"self_attention.{one}_layernorm.weight", f"self_attn.{one}_norm.weight", sharding=sharding)
        for one in ("q", "k")
    )
    for sharding in (Replicated(), ColumnParallel())
)
"""Norms of each head; and norms over all heads together, which tensor-parallel ranks split like the heads."""


def experts(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """Mappings of router and experts. Names are those on disk, relative to the layer; transformers' fused parameters
    have other names (kit/engines/huggingface/experts.py)."""
    ours, theirs = "mlp.experts.local_experts.{expert}", f"{block}.experts.{{expert}}"
    return (
        in_layer("mlp.router.weight", f"{block}.gate.weight", sharding=Replicated()),
        in_layer(
            f"{ours}.linear_fc1.weight", f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight", sharding=ColumnParallel()
        ),
        in_layer(f"{ours}.linear_fc2.weight", f"{theirs}.{down}.weight", sharding=RowParallel()),
    )


QWEN2 = (*LAYER, QKV_BIAS)
"""Biases on query, key and value."""
QWEN3 = (*LAYER, *QK_NORMS)
"""A norm per head on queries and keys."""
MIXTRAL = (*WITHOUT_MLP, *experts("block_sparse_moe", "w1", "w3", "w2"))
"""A router and experts in place of the MLP."""
QWEN3_MOE = (*WITHOUT_MLP, *QK_NORMS, *experts("mlp", "gate_proj", "up_proj", "down_proj"))
"""Qwen3 with a router and experts in place of the MLP."""


def llama(model: ModelSpec, layer: tuple[ParamMapping, ...]) -> tuple[ParamMapping, ...]:
    """The weight map of Llama, with another family's ``layer``."""
    embedding, *head = embedding_and_head(model, "model.embed_tokens.weight", "lm_head.weight")
    norm = ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
    return (embedding, *layer, norm, *head)


def phi3(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """On disk, query, key and value are one tensor, and gate and up are one tensor."""
    query, key_value = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    qkv, gated = (query, key_value, key_value), (model.ffn_hidden_size,) * 2
    on_disk = {
        mapping.megatron: mapping
        for mapping in (
            in_layer(
                "self_attention.linear_qkv.weight",
                "self_attn.qkv_proj.weight",
                sharding=ConcatenatedRows(QKV(), qkv),
            ),
            in_layer(
                "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", sharding=ConcatenatedRows(ColumnParallel(), gated)
            ),
        )
    }
    return llama(model, tuple(on_disk.get(mapping.megatron, mapping) for mapping in LAYER))

"""Llama: RMSNorm, rotary positions, grouped-query attention without biases, a gated MLP."""

from __future__ import annotations

from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.sharding import GatedRows, GroupedQkv, Replicated, Sliced, Vocabulary
from kit.specs.model import ModelSpec

QKV_WEIGHT = Entry(
    "decoder.layers.{layer}.self_attention.linear_qkv.weight",
    (
        "model.layers.{layer}.self_attn.q_proj.weight",
        "model.layers.{layer}.self_attn.k_proj.weight",
        "model.layers.{layer}.self_attn.v_proj.weight",
    ),
    GroupedQkv(),
)

LAYER = (
    Entry(
        "decoder.layers.{layer}.input_layernorm.weight", ("model.layers.{layer}.input_layernorm.weight",), Replicated()
    ),
    QKV_WEIGHT,
    Entry(
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        ("model.layers.{layer}.self_attn.o_proj.weight",),
        Sliced(dim=1),
    ),
    Entry(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        ("model.layers.{layer}.post_attention_layernorm.weight",),
        Replicated(),
    ),
    Entry(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        GatedRows(),
    ),
    Entry(
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
        ("model.layers.{layer}.mlp.down_proj.weight",),
        Sliced(dim=1),
    ),
)


def entries(model: ModelSpec, layer: tuple[Entry, ...] = LAYER) -> tuple[Entry, ...]:
    """The whole map; families that differ from Llama inside a layer only pass their own ``layer``."""
    output = "output_layer.weight"
    embedding = Entry(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        Vocabulary(),
        copy=output if model.tied_embeddings else None,
    )
    norm = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
    untied = () if model.tied_embeddings else (Entry(output, ("lm_head.weight",), Vocabulary()),)
    return (embedding, *layer, norm, *untied)

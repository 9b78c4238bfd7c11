"""GPT-2: LayerNorm, biases everywhere, learned positions; weights lie transposed on disk (Conv1D)."""

from __future__ import annotations

from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.sharding import Fused, GroupedQkv, Replicated, Rule, Sliced, Transposed, Vocabulary
from kit.specs.model import ModelSpec

_LAYER = "decoder.layers.{layer}."
_BLOCK = "transformer.h.{layer}."


def entries(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    qkv = Fused(GroupedQkv(), (model.hidden_size,) * 3)
    output = "output_layer.weight"
    embedding = Entry(
        "embedding.word_embeddings.weight",
        ("transformer.wte.weight",),
        Vocabulary(),
        copy=output if model.tied_embeddings else None,
    )
    untied = () if model.tied_embeddings else (Entry(output, ("lm_head.weight",), Vocabulary()),)
    return (
        embedding,
        Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",), Replicated()),
        *_norm(_LAYER + "input_layernorm", _BLOCK + "ln_1"),
        *_linear("self_attention.linear_qkv", "attn.c_attn", qkv, qkv),
        *_linear("self_attention.linear_proj", "attn.c_proj", Sliced(dim=1), Replicated()),
        *_norm(_LAYER + "pre_mlp_layernorm", _BLOCK + "ln_2"),
        *_linear("mlp.linear_fc1", "mlp.c_fc", Sliced(dim=0), Sliced(dim=0)),
        *_linear("mlp.linear_fc2", "mlp.c_proj", Sliced(dim=1), Replicated()),
        *_norm("decoder.final_layernorm", "transformer.ln_f"),
        *untied,
    )


def _linear(megatron: str, hugging_face: str, weight: Rule, bias: Rule) -> tuple[Entry, Entry]:
    megatron, hugging_face = _LAYER + megatron, _BLOCK + hugging_face
    return (
        Entry(f"{megatron}.weight", (f"{hugging_face}.weight",), Transposed(weight)),
        Entry(f"{megatron}.bias", (f"{hugging_face}.bias",), bias),
    )


def _norm(megatron: str, hugging_face: str) -> tuple[Entry, Entry]:
    return (
        Entry(f"{megatron}.weight", (f"{hugging_face}.weight",), Replicated()),
        Entry(f"{megatron}.bias", (f"{hugging_face}.bias",), Replicated()),
    )

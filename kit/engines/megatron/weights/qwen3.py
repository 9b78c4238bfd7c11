"""Qwen3: Llama with a norm per head on queries and keys."""

from __future__ import annotations

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.sharding import Replicated
from kit.specs.model import ModelSpec

QK_NORMS = tuple(
    Entry(
        f"decoder.layers.{{layer}}.self_attention.{one}_layernorm.weight",
        (f"model.layers.{{layer}}.self_attn.{one}_norm.weight",),
        Replicated(),
    )
    for one in ("q", "k")
)


def entries(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    return llama.entries(model, (*llama.LAYER, *QK_NORMS))

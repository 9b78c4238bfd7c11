"""Gemma 2 and 3: Llama with a norm on both sides of attention and MLP; Gemma 3 with norms of queries and keys too."""

from __future__ import annotations

import dataclasses

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.qwen3 import QK_NORMS
from kit.engines.megatron.weights.sharding import Replicated
from kit.specs.model import ModelSpec

_LAYER = "decoder.layers.{layer}."


def _before(entry: Entry) -> Entry:
    """Llama's second norm has another name here."""
    if entry.megatron != f"{_LAYER}pre_mlp_layernorm.weight":
        return entry
    return dataclasses.replace(entry, hugging_face=("model.layers.{layer}.pre_feedforward_layernorm.weight",))


_AFTER = tuple(
    Entry(f"{_LAYER}{place}.post_layernorm.weight", (f"model.layers.{{layer}}.{name}.weight",), Replicated())
    for place, name in (
        ("self_attention.linear_proj", "post_attention_layernorm"),
        ("mlp.linear_fc2", "post_feedforward_layernorm"),
    )
)
_GEMMA2 = (*(_before(entry) for entry in llama.LAYER), *_AFTER)


def gemma2(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    return llama.entries(model, _GEMMA2)


def gemma3(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    return llama.entries(model, (*_GEMMA2, *QK_NORMS))

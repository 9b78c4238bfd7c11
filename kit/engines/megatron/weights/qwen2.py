"""Qwen2: Llama with biases on query, key and value."""

from __future__ import annotations

import dataclasses

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.specs.model import ModelSpec

QKV_BIAS = dataclasses.replace(
    llama.QKV_WEIGHT,
    megatron=llama.QKV_WEIGHT.megatron.replace(".weight", ".bias"),
    hugging_face=tuple(name.replace(".weight", ".bias") for name in llama.QKV_WEIGHT.hugging_face),
)


def entries(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    return llama.entries(model, (*llama.LAYER, QKV_BIAS))

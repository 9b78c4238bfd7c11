"""Phi-3: Llama with query, key and value in one tensor on disk, and gate and up in one."""

from __future__ import annotations

import dataclasses

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.sharding import Fused, GatedRows, GroupedQkv
from kit.specs.model import ModelSpec


def entries(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    query, key_value = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    fused = {
        "linear_qkv.weight": ("self_attn.qkv_proj.weight", Fused(GroupedQkv(), (query, key_value, key_value))),
        "linear_fc1.weight": ("mlp.gate_up_proj.weight", Fused(GatedRows(), (model.ffn_hidden_size,) * 2)),
    }

    def changed(entry: Entry) -> Entry:
        for ending, (name, rule) in fused.items():
            if entry.megatron.endswith(ending):
                return dataclasses.replace(entry, hugging_face=(f"model.layers.{{layer}}.{name}",), rule=rule)
        return entry

    return llama.entries(model, tuple(changed(entry) for entry in llama.LAYER))

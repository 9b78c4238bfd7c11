"""DeepSeek-V3: latent attention, first layers with a dense MLP, then a router, shared experts and the others."""

from __future__ import annotations

import dataclasses

from kit.engines.megatron.weights import llama
from kit.engines.megatron.weights.mapping import Entry
from kit.engines.megatron.weights.moe import experts
from kit.engines.megatron.weights.sharding import GatedRows, Replicated, Rule, Sliced
from kit.specs.model import ModelSpec

_LAYER, _BLOCK = "decoder.layers.{layer}.", "model.layers.{layer}."


def _attention(megatron: str, hugging_face: str, rule: Rule) -> Entry:
    return Entry(f"{_LAYER}self_attention.{megatron}.weight", (f"{_BLOCK}self_attn.{hugging_face}.weight",), rule)


_COMPRESSED_QUERY = (
    _attention("linear_q_down_proj", "q_a_proj", Replicated()),
    _attention("q_layernorm", "q_a_layernorm", Replicated()),
    _attention("linear_q_up_proj", "q_b_proj", Sliced(0)),
)
_QUERY = (_attention("linear_q_proj", "q_proj", Sliced(0)),)
_KEY_VALUE = (
    _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", Replicated()),
    _attention("kv_layernorm", "kv_a_layernorm", Replicated()),
    _attention("linear_kv_up_proj", "kv_b_proj", Sliced(0)),
)
_AROUND = tuple(entry for entry in llama.LAYER if "linear_qkv" not in entry.megatron and ".mlp." not in entry.megatron)
_DENSE = tuple(dataclasses.replace(entry, experts=False) for entry in llama.LAYER if ".mlp." in entry.megatron)
_SHARED = (
    Entry(
        f"{_LAYER}mlp.shared_experts.linear_fc1.weight",
        (f"{_BLOCK}mlp.shared_experts.gate_proj.weight", f"{_BLOCK}mlp.shared_experts.up_proj.weight"),
        GatedRows(),
    ),
    Entry(
        f"{_LAYER}mlp.shared_experts.linear_fc2.weight", (f"{_BLOCK}mlp.shared_experts.down_proj.weight",), Sliced(1)
    ),
)

_CORRECTION = Entry(
    f"{_LAYER}mlp.router.expert_bias", (f"{_BLOCK}mlp.gate.e_score_correction_bias",), Replicated(), frozen=True
)


def deepseek_v3(model: ModelSpec) -> tuple[Entry, ...]:
    """The whole map."""
    assert model.latent is not None
    query = _QUERY if model.latent.q_lora_rank is None else _COMPRESSED_QUERY
    shared = _SHARED if model.num_shared_experts else ()
    routed = (_CORRECTION, *experts("mlp", "gate_proj", "up_proj", "down_proj"), *shared)
    of_experts = tuple(dataclasses.replace(entry, experts=True) for entry in routed)
    return llama.entries(model, (*_AROUND, *query, *_KEY_VALUE, *_DENSE, *of_experts))

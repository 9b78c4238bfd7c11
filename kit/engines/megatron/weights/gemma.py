"""Gemma 2 and 3: Llama with a norm on both sides of attention and MLP; Gemma 3 with norms of queries and keys too."""

from __future__ import annotations

from kit.engines.megatron.weights.llama import LAYER, QK_NORMS, in_layer, llama
from kit.engines.megatron.weights.mapping import ParamMapping
from kit.engines.megatron.weights.sharding import Replicated
from kit.specs.model import ModelSpec

_NORMS = {
    "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
_LAYER = (
    *(mapping for mapping in LAYER if "pre_mlp_layernorm" not in mapping.megatron),
    *(in_layer(megatron, hugging_face, sharding=Replicated()) for megatron, hugging_face in _NORMS.items()),
)


def gemma2(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """Norms on both sides of attention and MLP."""
    return llama(model, _LAYER)


def gemma3(model: ModelSpec) -> tuple[ParamMapping, ...]:
    """Gemma 2 with a norm per head on queries and keys."""
    return llama(model, (*_LAYER, *QK_NORMS))

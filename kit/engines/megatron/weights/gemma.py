"""Gemma 2 and 3: Llama with a norm on both sides of attention and MLP; Gemma 3 with norms of queries and keys too."""

from __future__ import annotations

from kit.engines.megatron.weights.llama import LAYER, QK_NORMS, in_layer
from kit.engines.megatron.weights.sharding import Replicated

_NORMS = {
    "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
GEMMA2 = (
    *(mapping for mapping in LAYER if "pre_mlp_layernorm" not in mapping.megatron),
    *(in_layer(megatron, hugging_face, sharding=Replicated()) for megatron, hugging_face in _NORMS.items()),
)
GEMMA3 = (*GEMMA2, *QK_NORMS)

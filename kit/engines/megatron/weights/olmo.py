"""OLMo 2 and 3: Llama with norms after attention and MLP instead of before, and norms over all heads together."""

from __future__ import annotations

from kit.engines.megatron.weights.llama import LAYER, WIDTH_NORMS, in_layer
from kit.engines.megatron.weights.sharding import Replicated

_NORMS = {
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
OLMO = (
    *(mapping for mapping in LAYER if "layernorm" not in mapping.megatron),
    *(in_layer(megatron, hugging_face, sharding=Replicated()) for megatron, hugging_face in _NORMS.items()),
    *WIDTH_NORMS,
)

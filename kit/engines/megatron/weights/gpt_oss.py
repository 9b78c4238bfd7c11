"""gpt-oss: Llama with biases everywhere, one attention sink per head, and a router and experts with biases.

Experts have the names of kit/engines/huggingface/fused_experts.py.
"""

from __future__ import annotations

from kit.engines.megatron.weights.llama import QKV_BIAS, WITHOUT_MLP, experts, in_layer
from kit.engines.megatron.weights.sharding import ColumnParallel, Replicated

_THEIRS, _OURS = "mlp.experts.{expert}", "mlp.experts.local_experts.{expert}"
GPT_OSS = (
    *WITHOUT_MLP,
    QKV_BIAS,
    in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", sharding=Replicated()),
    in_layer("self_attention.core_attention.sinks", "self_attn.sinks", sharding=ColumnParallel()),
    in_layer("mlp.router.weight", "mlp.router.weight", sharding=Replicated()),
    in_layer("mlp.router.bias", "mlp.router.bias", sharding=Replicated()),
    *experts("mlp", "gate_proj", "up_proj", "down_proj")[1:],
    in_layer(
        f"{_OURS}.linear_fc1.bias", f"{_THEIRS}.gate_proj.bias", f"{_THEIRS}.up_proj.bias", sharding=ColumnParallel()
    ),
    in_layer(f"{_OURS}.linear_fc2.bias", f"{_THEIRS}.down_proj.bias", sharding=Replicated()),
)

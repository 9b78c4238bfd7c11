"""Qwen2-MoE: Qwen2 with a router and experts in place of the MLP, and a shared expert with a weight for each token."""

from __future__ import annotations

from kit.engines.megatron.weights.llama import QKV_BIAS, WITHOUT_MLP, experts, in_layer
from kit.engines.megatron.weights.sharding import ColumnParallel, Replicated, RowParallel

_OURS, _THEIRS = "mlp.shared_experts", "mlp.shared_expert"
QWEN2_MOE = (
    *WITHOUT_MLP,
    QKV_BIAS,
    *experts("mlp", "gate_proj", "up_proj", "down_proj"),
    in_layer(
        f"{_OURS}.linear_fc1.weight",
        f"{_THEIRS}.gate_proj.weight",
        f"{_THEIRS}.up_proj.weight",
        sharding=ColumnParallel(),
    ),
    in_layer(f"{_OURS}.linear_fc2.weight", f"{_THEIRS}.down_proj.weight", sharding=RowParallel()),
    in_layer(f"{_OURS}.gate_weight", "mlp.shared_expert_gate.weight", sharding=Replicated()),
)

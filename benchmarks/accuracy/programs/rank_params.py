"""Parameters of one layer on a rank: matrices, vectors and experts, which are split and sharded differently."""

from __future__ import annotations

from kit.cost.model.params import count
from kit.cost.workload import Workload


def layer_parameters(workload: Workload, has_experts: bool) -> tuple[float, float, float]:
    """(matrices, vectors, experts) of one layer on a rank; key and value heads are never split."""
    model, layout = workload.model, workload.layout
    layer = count(model).layer if has_experts else count(model).first_layer
    missing = max(0.0, 1 - model.num_key_value_heads / layout.tp) if model.latent is None else 0.0
    matrices = (layer.attention + layer.mlp) / layout.tp + layer.latent + layer.router
    matrices += 2 * model.hidden_size * model.head_dim * missing
    experts = (layer.experts + layer.expert_biases) / (layout.ep * layout.etp)
    return matrices, layer.split_biases / layout.tp + layer.replicated, experts


def largest_layer_parameters(workload: Workload, stage: int) -> float:
    """Of the largest layer of a stage, all kinds together; 0 where it has none."""
    kinds = enumerate(workload.stages.stage_kinds[stage])
    return max((sum(layer_parameters(workload, bool(kind))) for kind, number in kinds if number), default=0.0)

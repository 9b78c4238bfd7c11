"""Parameters that one rank holds: dense ones, experts, and the vocabulary, which are split and sharded differently."""

from __future__ import annotations

from kit.cost.model.params import RankParameters, count
from kit.cost.workload import Workload
from kit.specs.model import ModelSpec


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
    kinds = enumerate(workload.stage_kinds[stage])
    return max((sum(layer_parameters(workload, bool(kind))) for kind, number in kinds if number), default=0.0)


def rank_parameters(workload: Workload, stage: int) -> RankParameters:
    """What one rank of a pipeline stage holds.

    megatron-core: embedding on the first stage, final norm and head on the last; with tied embeddings a second copy
    of the embedding there (models/common/language_module/language_module.py). Multi-token prediction adds a layer, a
    projection of 2h onto h, norms, and a copy of the embedding where it is not on that stage.
    """
    model, layout = workload.model, workload.layout
    h, pipelined, mtp = model.hidden_size, layout.pp > 1, workload.mtp_layers
    matrices = vectors = experts = vocabulary = 0.0
    for kind, number in enumerate(workload.stage_kinds[stage]):
        parts = layer_parameters(workload, bool(kind)) if number else (0.0, 0.0, 0.0)
        matrices, vectors, experts = (
            total + number * part for total, part in zip((matrices, vectors, experts), parts, strict=True)
        )
    table = -(-model.vocab_size // layout.tp) * h
    if stage == 0:
        vocabulary += table + (model.max_position_embeddings * h if model.learned_positions else 0)
    if stage == layout.pp - 1:
        vectors += _norm(model)
        vocabulary += table if not model.tied_embeddings or pipelined else 0
        if mtp:
            parts = layer_parameters(workload, model.has_experts(model.num_layers - 1))
            matrices += mtp * (parts[0] + 2 * h * h / layout.tp)
            vectors += mtp * (parts[1] + 3 * _norm(model))
            experts += mtp * parts[2]
            vocabulary += table if pipelined and not model.tied_embeddings else 0
    return RankParameters(dense_matrices=matrices, vectors=vectors, vocabulary=vocabulary, experts=experts)


def _norm(model: ModelSpec) -> int:
    return model.hidden_size if model.norm == "rmsnorm" else 2 * model.hidden_size

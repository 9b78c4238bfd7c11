"""Parameters that one rank holds: dense ones, experts, and the vocabulary, which are split and sharded differently."""

from __future__ import annotations

from kit.cost.model.params import RankParameters
from kit.cost.workload import Workload
from kit.specs.model import ModelSpec


def _attention_matrices(model: ModelSpec, tp: int) -> float:
    """Matrices of attention on a rank. Latent attention: down-projections are whole on every rank."""
    h, latent = model.hidden_size, model.latent
    if latent is None:
        key_value = max(model.key_value_width / tp, model.head_dim)
        return h * (model.query_width / tp + 2 * key_value) + h * model.value_width / tp
    query = h * model.query_width / tp
    if latent.q_lora_rank is not None:
        query = h * latent.q_lora_rank + latent.q_lora_rank * model.query_width / tp
    key_value = h * (latent.kv_lora_rank + latent.rope_head_dim)
    up = latent.kv_lora_rank * model.num_attention_heads * (latent.nope_head_dim + latent.value_head_dim) / tp
    return query + key_value + up + h * model.value_width / tp


def _mlp_matrices(model: ModelSpec, width: float) -> float:
    return (3 if model.gated_mlp else 2) * model.hidden_size * width


def layer_parameters(workload: Workload, has_experts: bool) -> tuple[float, float, float]:
    """(matrices, vectors, experts) of one layer on a rank."""
    model, tp, ep, etp = workload.model, workload.layout.tp, workload.layout.ep, workload.layout.etp
    h, matrices, experts = model.hidden_size, _attention_matrices(model, tp), 0.0
    vectors: float = _norm(model) * (1 if model.parallel_residual else 2)
    if model.latent is not None and model.qk_norm:
        vectors += model.latent.kv_lora_rank + (model.latent.q_lora_rank or 0)
    elif model.qk_norm:
        vectors += 2 * model.head_dim
    if model.qkv_bias:
        vectors += (model.query_width + 2 * model.key_value_width) / tp
    if model.linear_bias:
        vectors += h
    if has_experts:
        width = model.moe_ffn_hidden_size / etp
        experts = model.num_experts / ep * _mlp_matrices(model, width)
        if model.linear_bias:
            experts += model.num_experts / ep * (width + h)
        matrices += h * model.num_experts + _mlp_matrices(model, model.shared_ffn_hidden_size / tp)
    else:
        matrices += _mlp_matrices(model, model.ffn_hidden_size / tp)
        vectors += model.ffn_hidden_size / tp + h if model.linear_bias else 0
    return matrices, vectors, experts


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

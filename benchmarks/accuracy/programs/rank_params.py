"""Parameters that one rank holds: dense ones, experts, and the vocabulary, which are split and sharded differently."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from kit.cost.model.params import RankParameters
from kit.cost.setup import Shape, TrainingSetup
from kit.cost.stages import stage_kinds

Setup = TypeVar("Setup", bound=TrainingSetup)


def attention_matrices(shape: Shape, tp: int) -> float:
    """Matrices of attention on a rank. Latent attention: down-projections are whole on every rank."""
    h = shape.hidden_size
    if shape.latent is None:
        key_value = max(shape.key_value_width / tp, shape.head_dim)
        return h * (shape.query_width / tp + 2 * key_value) + h * shape.value_width / tp
    latent, heads = shape.latent, shape.num_attention_heads
    query = h * shape.query_width / tp
    if latent.q_lora_rank is not None:
        query = h * latent.q_lora_rank + latent.q_lora_rank * shape.query_width / tp
    key_value = h * (latent.kv_lora_rank + latent.rope_head_dim)
    up = latent.kv_lora_rank * heads * (latent.nope_head_dim + latent.value_head_dim) / tp
    return query + key_value + up + h * shape.value_width / tp


def mlp_matrices(shape: Shape, ffn_hidden_size: float) -> float:
    """Matrices of an MLP of that width."""
    return (3 if shape.gated_mlp else 2) * shape.hidden_size * ffn_hidden_size


def layer_parameters(setup: TrainingSetup, has_experts: bool) -> tuple[float, float, float]:
    """(matrices, vectors, experts) of one layer on a rank."""
    return _layer(setup.shape, has_experts, setup.tp, setup.ep, setup.etp)


def with_parameters(setup: Setup) -> Setup:
    """The setup with what each of its ranks holds."""
    return replace(
        setup,
        parameters=tuple(rank_parameters(setup, stage) for stage in range(setup.pp)),
        dense_layer_matrices=layer_parameters(setup, False)[0],
    )


def largest_layer_parameters(setup: TrainingSetup, stage: int) -> float:
    """Parameters of a stage's largest layer, all kinds together; 0 if the stage has no layer."""
    return max((sum(layer_parameters(setup, has_experts)) for has_experts, _ in _held(setup, stage)), default=0.0)


def _held(setup: TrainingSetup, stage: int) -> tuple[tuple[bool, int], ...]:
    """(whether they have experts, number) of the kinds of layers that a stage holds. Layers of a kind are equal."""
    dense, experts = stage_kinds(setup, stage)
    return tuple((has, number) for has, number in ((False, dense), (True, experts)) if number)


@lru_cache(maxsize=4096)
def _layer(shape: Shape, has_experts: bool, tp: int, ep: int, etp: int) -> tuple[float, float, float]:
    h = shape.hidden_size
    norm = h if shape.norm == "rmsnorm" else 2 * h
    vectors: float = norm * (1 if shape.parallel_residual else 2)
    matrices, experts = attention_matrices(shape, tp), 0.0
    if shape.latent is not None and shape.qk_norm:
        vectors += shape.latent.kv_lora_rank + (shape.latent.q_lora_rank or 0)
    elif shape.qk_norm:
        vectors += 2 * shape.head_dim
    if shape.linear_bias or shape.qkv_bias:
        vectors += (shape.query_width + 2 * shape.key_value_width) / tp
    if shape.linear_bias:
        vectors += h
    if has_experts and shape.experts is not None:
        moe = shape.experts
        experts = moe.num_experts / ep * mlp_matrices(shape, moe.ffn_hidden_size / etp)
        if shape.linear_bias:
            experts += moe.num_experts / ep * (moe.ffn_hidden_size / etp + h)
        matrices += h * moe.num_experts + mlp_matrices(shape, moe.shared_ffn_hidden_size / tp)
    else:
        matrices += mlp_matrices(shape, shape.ffn_hidden_size / tp)
        vectors += shape.ffn_hidden_size / tp + h if shape.linear_bias else 0
    return matrices, vectors, experts


def rank_parameters(setup: TrainingSetup, stage: int) -> RankParameters:
    """Parameters of a rank of pipeline stage ``stage``. megatron-core: embedding on the first stage, final norm and
    head on the last; with tied embeddings a second copy
    of the embedding there (models/common/language_module/language_module.py). Multi-token prediction adds a layer, a
    projection of 2h onto h, norms, and a copy of the embedding where it is not on that stage.
    """
    place = (setup.pp > 1, stage == 0, stage == setup.pp - 1)
    return _counted(setup.shape, setup.tp, setup.ep, setup.etp, stage_kinds(setup, stage), *place)


@lru_cache(maxsize=4096)
def _counted(
    shape: Shape, tp: int, ep: int, etp: int, held: tuple[int, int], pipelined: bool, first: bool, last: bool
) -> RankParameters:
    """Parameters of a stage with ``held`` (dense layers, layers with experts). Cached, because a search asks for
    thousands of layouts."""
    h = shape.hidden_size
    matrices = vectors = experts = 0.0
    for has_experts, number in zip((False, True), held, strict=True):
        parts = _layer(shape, has_experts, tp, ep, etp) if number else (0.0, 0.0, 0.0)
        matrices += number * parts[0]
        vectors += number * parts[1]
        experts += number * parts[2]
    norm = h if shape.norm == "rmsnorm" else 2 * h
    table = -(-shape.vocab_size // tp) * h
    vocabulary = 0.0
    if first:
        vocabulary += table + shape.learned_positions * h
    if last:
        vectors += norm
        if not shape.tied_embeddings or pipelined:
            vocabulary += table
    if last and shape.mtp_layers:
        parts = _layer(shape, bool(shape.expert_layers) and shape.expert_layers[-1], tp, ep, etp)
        matrices += shape.mtp_layers * (parts[0] + 2 * h * h / tp)
        vectors += shape.mtp_layers * (parts[1] + 3 * norm)
        experts += shape.mtp_layers * parts[2]
        if pipelined and not shape.tied_embeddings:
            vocabulary += table
    return RankParameters(dense_matrices=matrices, vectors=vectors, vocabulary=vocabulary, experts=experts)

"""What Megatron-LM's own estimate would say of a run, for comparison only.

Read in its repository (megatron/training/theoretical_memory_usage.py, report_theoretical_memory, at 00caa53, 2026): the
rules are its, the words are ours. It is a program's argument parser that calls it, so it cannot be called here.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs.rank_params import rank_parameters
from kit.cost.setup import Shape, TrainingSetup


def model_parameters(setup: TrainingSetup) -> float:
    """Parameters of the whole model, as on one rank of an unsplit run."""
    whole = replace(setup, tp=1, pp=1, vp=1, cp=1, ep=1, etp=1, stage_layers=())
    return rank_parameters(whole, 0).total


def megatron_theoretical(setup: TrainingSetup) -> float:
    """Bytes of the first pipeline stage: weights, gradients and optimizer, and activations."""
    return _states(setup) + _activations(setup)


def _states(setup: TrainingSetup) -> float:
    """All experts on every rank, whatever the expert parallelism."""
    shape, h = setup.shape, float(setup.shape.hidden_size)
    with_experts = sum(shape.expert_layers) if shape.expert_layers else 0
    norm = 1 if shape.norm == "rmsnorm" else 2
    gate = 1.5 if shape.gated_mlp else 1.0
    attention = _attention(shape, norm)
    dense = 2 * h * (shape.ffn_hidden_size * gate + norm) + attention
    moe = 0.0
    if shape.experts is not None:
        width = shape.experts.ffn_hidden_size * shape.experts.num_experts + shape.experts.shared_ffn_hidden_size
        moe = 2 * h * (width * gate + norm) + attention
    block = dense * (shape.num_layers - with_experts) + moe * with_experts + norm * h
    last_has_experts = bool(shape.expert_layers) and shape.expert_layers[-1]
    table = h * shape.vocab_size
    fullest = block / setup.pp + shape.mtp_layers * (moe if last_has_experts else dense) + table
    if not shape.tied_embeddings and setup.pp == 1:
        fullest += table
    return fullest / setup.tp * (6 + 12 / setup.dp if setup.sharding == "optimizer" else 18.0)


def _attention(shape: Shape, norm: int) -> float:
    h, heads = float(shape.hidden_size), shape.num_attention_heads
    if shape.latent is None:
        ratio = shape.num_key_value_heads / heads
        return 2 * h * h * (1 + ratio) * heads * shape.head_dim / h
    latent = shape.latent
    query = h * heads * latent.query_head_dim
    if latent.q_lora_rank is not None:
        query = latent.q_lora_rank * (h + heads * latent.query_head_dim + norm)
    key_value = latent.kv_lora_rank * (h + heads * (latent.nope_head_dim + latent.value_head_dim) + norm)
    return query + key_value + h * latent.rope_head_dim + heads * latent.value_head_dim * h


def _activations(setup: TrainingSetup) -> float:
    """Table 2 of arXiv 2205.05198 with sequence parallelism and selective recompute; without both, 10 + 24/t bytes a
    token and width, and a twentieth for the rest."""
    shape, h = setup.shape, setup.shape.hidden_size
    tokens = float(setup.micro_batch_size * setup.seq_length)
    split = setup.sp and setup.recompute == "selective"
    layer = 18 + 4 * shape.ffn_hidden_size / h if split else 10 + 24 / setup.tp
    total = tokens * h * layer * shape.num_layers + 8 * tokens * setup.pp + tokens * h * setup.pp
    if setup.vp > 1:
        total *= 1 + (setup.pp - 1) / (setup.pp * setup.vp)
    elif setup.pp > 1:
        total *= min(1.0, setup.micro_batches / setup.pp)
    if setup.pp == 1:
        total += 4 * tokens * (h + shape.vocab_size) if split else 2 * tokens * (shape.vocab_size / setup.tp + h)
    return total / setup.tp if split else total * 1.05

"""What Megatron-LM's own estimate would say of a run, for comparison only.

Read in its repository (megatron/training/theoretical_memory_usage.py, report_theoretical_memory, at 00caa53, 2026): the
rules are its, the words are ours. It is a program's argument parser that calls it, so it cannot be called here.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs.published import PublishedModel, PublishedWorkload


def model_parameters(workload: PublishedWorkload) -> float:
    """Parameters of the whole model, as on one rank of an unsplit run."""
    layout = replace(workload.layout, tp=1, pp=1, vp=1, cp=1, ep=1, etp=1)
    return replace(workload, layout=layout, stated_chunks=()).parameters[0].total


def megatron_theoretical(workload: PublishedWorkload) -> float:
    """Bytes of the first pipeline stage: weights, gradients and optimizer, and activations."""
    return _states(workload) + _activations(workload)


def _states(workload: PublishedWorkload) -> float:
    """All experts on every rank, whatever the expert parallelism."""
    model, h = workload.model, float(workload.model.hidden_size)
    with_experts = sum(model.expert_layers)
    norm = 1 if model.norm == "rmsnorm" else 2
    gate = 1.5 if model.gated_mlp else 1.0
    attention = _attention(model, norm)
    dense = 2 * h * (model.ffn_hidden_size * gate + norm) + attention
    moe = 0.0
    if model.num_experts:
        width = model.moe_ffn_hidden_size * model.num_experts + model.shared_ffn_hidden_size
        moe = 2 * h * (width * gate + norm) + attention
    block = dense * (model.num_layers - with_experts) + moe * with_experts + norm * h
    last_has_experts = model.has_experts(model.num_layers - 1)
    table = h * model.vocab_size
    fullest = block / workload.layout.pp + workload.mtp_layers * (moe if last_has_experts else dense) + table
    if not model.tied_embeddings and workload.layout.pp == 1:
        fullest += table
    return fullest / workload.layout.tp * (6 + 12 / workload.layout.dp if workload.layout.zero_stage == 1 else 18.0)


def _attention(model: PublishedModel, norm: int) -> float:
    h, heads = float(model.hidden_size), model.num_attention_heads
    if model.latent is None:
        ratio = model.num_key_value_heads / heads
        return 2 * h * h * (1 + ratio) * heads * model.head_dim / h
    latent = model.latent
    query = h * heads * latent.query_head_dim
    if latent.q_lora_rank is not None:
        query = latent.q_lora_rank * (h + heads * latent.query_head_dim + norm)
    key_value = latent.kv_lora_rank * (h + heads * (latent.nope_head_dim + latent.value_head_dim) + norm)
    return query + key_value + h * latent.rope_head_dim + heads * latent.value_head_dim * h


def _activations(workload: PublishedWorkload) -> float:
    """Table 2 of arXiv 2205.05198 with sequence parallelism and selective recompute; without both, 10 + 24/t bytes a
    token and width, and a twentieth for the rest."""
    model, h = workload.model, workload.model.hidden_size
    tokens = float(workload.layout.micro_batch_size * workload.job.seq_length)
    split = workload.layout.sp and workload.layout.recompute == "selective"
    layer = 18 + 4 * model.ffn_hidden_size / h if split else 10 + 24 / workload.layout.tp
    total = tokens * h * layer * model.num_layers + 8 * tokens * workload.layout.pp + tokens * h * workload.layout.pp
    if workload.layout.vp > 1:
        total *= 1 + (workload.layout.pp - 1) / (workload.layout.pp * workload.layout.vp)
    elif workload.layout.pp > 1:
        total *= min(1.0, workload.layout.gradient_accumulation_steps / workload.layout.pp)
    if workload.layout.pp == 1:
        total += (
            4 * tokens * (h + model.vocab_size) if split else 2 * tokens * (model.vocab_size / workload.layout.tp + h)
        )
    return total / workload.layout.tp if split else total * 1.05

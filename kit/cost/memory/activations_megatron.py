"""What autograd saves of kit's local Megatron layer (kit/engines/megatron/model/layers.py), in bytes, by
operator.

megatron-core's linear layers, MLP and experts; norms and attention are torch's own operators. ``shard`` counts a token
where sequence parallelism splits it, ``token`` where tensor parallelism has gathered it and splits the width instead:
ColumnParallelLinear saves its input split and gathers it again in backward (tensor_parallel/layers.py).
"""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.specs.model import LatentAttention


def layer_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Bytes that one layer saves for backward per micro batch, without recompute, by operator."""
    model, tokens, shard, element = workload.model, workload.tokens, workload.shard_tokens, workload.element
    statistics = 4 if model.norm == "rmsnorm" else 8
    # Inputs of all norms, in fp32 where they scale by 1 + weight (norms.py); the results of two are the inputs of the
    # first matrices.
    width = 4 if model.traits.zero_centred_norm else element
    norms = (4 if model.traits.norm_placement == "both" else 2) * (width * model.hidden_size + statistics)
    terms = {"norms": (norms + 2 * element * model.hidden_size) * shard}
    terms |= _latent(workload, model.latent) if model.latent else _attention(workload)
    if not model.learned_positions:
        # cos and sin of query and of key, cast anew in each layer (rope_utils.py), shared by a micro batch's sequences
        terms["rope"] = 4 * element * model.head_dim * tokens / workload.layout.micro_batch_size
    if has_experts:
        terms |= _experts(workload)
    else:
        # Gate and up are one tensor (2f); silu(gate), up + offset and product are one each (transformer/mlp.py, glu).
        # Without a gate: what the activation takes, and what it gives.
        widths = 5 if model.gated_mlp else 2
        terms["mlp"] = widths * element * model.ffn_hidden_size / workload.layout.tp * tokens
    return terms


def _attention(workload: Workload) -> dict[str, float]:
    """The value is a view of the whole projection's result, which stays; query and key are rotated copies.

    torch's kernels give the output the query's own layout, (sequence, batch, head), so that the projection's input is
    a view of it.
    """
    model, element = workload.model, workload.element
    heads = model.num_attention_heads / workload.layout.tp
    query = heads * model.head_dim
    key_value = max(model.num_key_value_heads / workload.layout.tp, 1) * model.head_dim
    rotated = 0.0 if model.learned_positions else query + key_value
    inputs, output = rotated + (query + 2 * key_value), query
    if workload.layout.cp > 1 and workload.layout.cp_comm_type == "p2p" and workload.layout.recompute != "selective":
        # A copy of this rank's keys and values (ring.py), and the output once for each order of its dimensions.
        inputs, output = query + 2 * key_value, 2 * query
    elif workload.layout.cp > 1 and workload.layout.recompute != "selective":
        # Keys and values of the whole sequence instead (context.py), and both halves of the output beside their sum.
        inputs, output = query + 2 * key_value * workload.layout.cp, 2 * query
    saved = element * (inputs + output)
    if model.traits.qk_norm != "none":
        saved += element * query + 4 * (heads + key_value / model.head_dim)
    return {"attention": saved * workload.tokens, "core_attn": _scores(workload)}


def _scores(workload: Workload) -> float:
    """Log-sum-exp of fused kernels. Scores that exist as tensors (attention.py, _materialised): capped, their softmax
    in fp32, and its cast to 16 bits."""
    heads = workload.model.num_attention_heads / workload.layout.tp
    if workload.attention != "unfused":
        return 4 * heads * workload.tokens
    return 8 * heads * workload.job.seq_length * workload.tokens


def _latent(workload: Workload, latent: LatentAttention) -> dict[str, float]:
    """latent.py: compressed states before and after their norms; queries and keys put together from their two parts;
    the value is a view of the result of the up-projection, which stays."""
    heads = workload.model.num_attention_heads / workload.layout.tp
    compressed = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.rope_head_dim
    per_head = 2 * latent.query_head_dim + latent.nope_head_dim + 2 * latent.value_head_dim
    if workload.layout.cp > 1 and workload.layout.recompute != "selective":
        gathered = (latent.query_head_dim + latent.value_head_dim) * workload.layout.cp
        per_head = latent.query_head_dim + gathered + 2 * latent.value_head_dim
    saved = workload.element * (compressed * workload.shard_tokens + per_head * heads * workload.tokens)
    return {"attention": saved, "core_attn": _scores(workload)}


def _experts(workload: Workload) -> dict[str, float]:
    """For each expert of a token, when experts are equally popular: the token's copy, gathered where experts are cut,
    and one GEMM result more than a dense MLP, with the router's score (mlp.py, per_token_scale)."""
    model, layout = workload.model, workload.layout
    token = model.hidden_size * layout.etp / layout.tp
    width = 6 * model.moe_ffn_hidden_size / layout.tp
    return {"experts": workload.element * model.experts_per_token * (token + width) * workload.tokens}


def backward_workspace_bytes(workload: Workload, has_experts: bool) -> float:
    """What exists at once in the backward of a layer beside what it saves.

    Gradients of two widths of the MLP and of the stream. Experts: one after the other, each with its product with the
    router's scores and two gradients of it in fp32 (mlp.py, per_token_scale); or, when all have run, four copies of the
    tokens on their way back.
    """
    model, element = workload.model, workload.element
    hidden = 2 * element * model.hidden_size * workload.tokens
    if not has_experts:
        width = (3 if model.gated_mlp else 2) * model.ffn_hidden_size / workload.layout.tp
        return hidden + max(element * width * workload.tokens, _scores(workload))
    arrived = workload.shard_tokens * model.experts_per_token * workload.layout.etp
    token = element * model.hidden_size * arrived
    one_expert = (
        12 * model.moe_ffn_hidden_size / workload.layout.etp * arrived / (model.num_experts / workload.layout.ep)
    )
    return hidden + max(4 * token, one_expert + token)


def local_loss_bytes(workload: Workload, entries: float) -> float:
    """Fullest moment of head and loss; ``entries``: of the logits on this rank.

    Loss: 16-bit logits and one fp32 copy, in place (tensor_parallel/cross_entropy.py); fp32 ones are copied likewise,
    since they are the result of a product that others may see. Backward of the head, which may be fuller: gradients of
    the logits and, without a fused accumulation, of the weight; the gathered input and its gradient
    (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    element, h = workload.element, workload.model.hidden_size
    table = entries / workload.tokens * h
    head = element * (entries + table + 2 * h * workload.tokens)
    return max((element + (4 if element == 2 else 0)) * entries, head)


def table_gradients(workload: Workload, stage: int) -> float:
    """The embedding's gradient, last of all, before it is added to the buffer; where the head is the same table, beside
    the head's and their sum (autograd adds them up outside of the fused accumulation)."""
    if stage:
        return 0.0
    table = -(-workload.model.vocab_size // workload.layout.tp) * workload.model.hidden_size
    return workload.element * table * (3 if workload.model.tied_embeddings and workload.layout.pp == 1 else 1)

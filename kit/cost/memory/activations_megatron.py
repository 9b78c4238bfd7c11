"""What autograd keeps of kit's local Megatron layer (kit/engines/megatron/model/layers.py), in bytes, by
operator.

megatron-core's linear layers, MLP and experts; norms and attention are torch's own operators. ``shard`` counts a token
where sequence parallelism splits it, ``token`` where tensor parallelism has gathered it and splits the width instead:
ColumnParallelLinear keeps its input split and gathers it again in backward (tensor_parallel/layers.py).
"""

from __future__ import annotations

from kit.cost.setup import Experts, LatentAttention, TrainingSetup


def layer_terms(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Bytes that one layer saves for backward per micro batch, without recompute, by operator."""
    shape, tokens, shard, element = setup.shape, setup.tokens, setup.shard_tokens, setup.element
    statistics = 4 if shape.norm == "rmsnorm" else 8
    # Inputs of all norms, in fp32 where they scale by 1 + weight (norms.py); the results of two are the inputs of the
    # first matrices.
    width = 4 if shape.zero_centred_norm else element
    norms = shape.norms_per_layer * (width * shape.hidden_size + statistics)
    terms = {"norms": (norms + 2 * element * shape.hidden_size) * shard}
    terms |= _latent(setup, shape.latent) if shape.latent else _attention(setup)
    if not shape.learned_positions:
        # cos and sin of query and of key, cast anew in each layer (rope_utils.py), shared by a micro batch's sequences
        terms["rope"] = 4 * element * shape.head_dim * tokens / setup.micro_batch_size
    if has_experts and shape.experts is not None:
        terms |= _experts(setup, shape.experts)
    else:
        # Gate and up are one tensor (2f); silu(gate), up + offset and product are one each (transformer/mlp.py, glu).
        # Without a gate: what the activation takes, and what it gives.
        widths = 5 if shape.gated_mlp else 2
        terms["mlp"] = widths * element * shape.ffn_hidden_size / setup.tp * tokens
    return terms


def _attention(setup: TrainingSetup) -> dict[str, float]:
    """The value is a view of the whole projection's result, which stays; query and key are rotated copies.

    torch's kernels give the output the query's own layout, (sequence, batch, head), so that the projection's input is
    a view of it.
    """
    shape, element = setup.shape, setup.element
    heads = shape.num_attention_heads / setup.tp
    query = heads * shape.head_dim
    key_value = max(shape.num_key_value_heads / setup.tp, 1) * shape.head_dim
    rotated = 0.0 if shape.learned_positions else query + key_value
    inputs, output = rotated + (query + 2 * key_value), query
    if setup.cp > 1 and setup.exchange == "p2p" and setup.recompute != "selective":
        # A copy of this rank's keys and values (ring.py), and the output once for each order of its dimensions.
        inputs, output = query + 2 * key_value, 2 * query
    elif setup.cp > 1 and setup.recompute != "selective":
        # Keys and values of the whole sequence instead (context.py), and both halves of the output beside their sum.
        inputs, output = query + 2 * key_value * setup.cp, 2 * query
    kept = element * (inputs + output)
    if shape.qk_norm:
        kept += element * query + 4 * (heads + key_value / shape.head_dim)
    return {"attention": kept * setup.tokens, "core_attn": _scores(setup)}


def _scores(setup: TrainingSetup) -> float:
    """Log-sum-exp of fused kernels. Scores that exist as tensors (attention.py, _materialised): capped, their softmax
    in fp32, and its cast to 16 bits."""
    heads = setup.shape.num_attention_heads / setup.tp
    if setup.attention != "unfused":
        return 4 * heads * setup.tokens
    return 8 * heads * setup.seq_length * setup.tokens


def _latent(setup: TrainingSetup, latent: LatentAttention) -> dict[str, float]:
    """latent.py: compressed states before and after their norms; queries and keys put together from their two parts;
    the value is a view of the result of the up-projection, which stays."""
    heads = setup.shape.num_attention_heads / setup.tp
    compressed = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.rope_head_dim
    per_head = 2 * latent.query_head_dim + latent.nope_head_dim + 2 * latent.value_head_dim
    if setup.cp > 1 and setup.recompute != "selective":
        gathered = (latent.query_head_dim + latent.value_head_dim) * setup.cp
        per_head = latent.query_head_dim + gathered + 2 * latent.value_head_dim
    kept = setup.element * (compressed * setup.shard_tokens + per_head * heads * setup.tokens)
    return {"attention": kept, "core_attn": _scores(setup)}


def _experts(setup: TrainingSetup, moe: Experts) -> dict[str, float]:
    """For each expert of a token, when experts are equally popular: the token's copy, gathered where experts are cut,
    and one product more than a dense MLP, with the router's score (mlp.py, per_token_scale)."""
    token = setup.shape.hidden_size * setup.etp / setup.tp
    width = 6 * moe.ffn_hidden_size / setup.tp
    return {"experts": setup.element * moe.experts_per_token * (token + width) * setup.tokens}


def backward_workspace_bytes(setup: TrainingSetup, has_experts: bool) -> float:
    """What exists at once in the backward of a layer beside what it keeps.

    Gradients of two widths of the MLP and of the stream. Experts: one after the other, each with its product with the
    router's scores and two gradients of it in fp32 (mlp.py, per_token_scale); or, when all have run, four copies of the
    tokens on their way back.
    """
    shape, element = setup.shape, setup.element
    hidden = 2 * element * shape.hidden_size * setup.tokens
    if not has_experts or shape.experts is None:
        width = (3 if shape.gated_mlp else 2) * shape.ffn_hidden_size / setup.tp
        return hidden + max(element * width * setup.tokens, _scores(setup))
    moe = shape.experts
    arrived = setup.shard_tokens * moe.experts_per_token * setup.etp
    token = element * shape.hidden_size * arrived
    one_expert = 12 * moe.ffn_hidden_size / setup.etp * arrived / (moe.num_experts / setup.ep)
    return hidden + max(4 * token, one_expert + token)


def local_loss_bytes(setup: TrainingSetup, entries: float) -> float:
    """Fullest moment of head and loss; ``entries``: of the logits on this rank.

    Loss: 16-bit logits and one fp32 copy, in place (tensor_parallel/cross_entropy.py); fp32 ones are copied likewise,
    since they are the result of a product that others may see. Backward of the head, which may be fuller: gradients of
    the logits and, without a fused accumulation, of the weight; the gathered input and its gradient
    (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    element, h = setup.element, setup.shape.hidden_size
    table = entries / setup.tokens * h
    head = element * (entries + table + 2 * h * setup.tokens)
    return max((element + (4 if element == 2 else 0)) * entries, head)


def table_gradients(setup: TrainingSetup, stage: int) -> float:
    """The embedding's gradient, last of all, before it is added to the buffer; where the head is the same table, beside
    the head's and their sum (autograd adds them up outside of the fused accumulation)."""
    if stage:
        return 0.0
    table = -(-setup.shape.vocab_size // setup.tp) * setup.shape.hidden_size
    return setup.element * table * (3 if setup.shape.tied_embeddings and setup.pp == 1 else 1)

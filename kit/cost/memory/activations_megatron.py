"""Bytes that autograd saves for backward in kit's local Megatron layer, by operator.

kit/engines/megatron/model/layers.py combines megatron-core's linear layers, MLP and experts with torch's own norms and
attention. ``shard`` is the number of tokens where sequence parallelism splits them; ``tokens`` is the number after the
all-gather, where tensor parallelism splits the width. ColumnParallelLinear saves its sharded input and gathers it again
in backward (tensor_parallel/layers.py).
"""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.specs.job import LoraSpec
from kit.specs.model import LatentAttention


def layer_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Bytes that one layer saves for backward per micro batch, without recompute, by operator."""
    model, tokens, shard, element = workload.model, workload.tokens, workload.shard_tokens, workload.element
    statistics = 4 if model.norm == "rmsnorm" else 8
    # All norms save their input, in fp32 if they scale by 1 + weight (norms.py). The linear layers save two norm
    # outputs.
    width = 4 if model.traits.zero_centred_norm else element
    norms = (4 if model.traits.norm_placement == "both" else 2) * (width * model.hidden_size + statistics)
    lora = workload.job.lora
    # Frozen weights without adapters do not need their input in backward.
    inputs = (
        2 if lora is None else _adapted(lora, "q_proj", "k_proj", "v_proj") + _adapted(lora, "gate_proj", "up_proj")
    )
    terms = {"norms": (norms + inputs * element * model.hidden_size) * shard}
    terms |= _latent(workload, model.latent) if model.latent else _attention(workload)
    if not model.learned_positions:
        # Each layer casts cos and sin for query and for key (rope_utils.py); sequences of a micro batch share them.
        terms["rope"] = 4 * element * model.head_dim * tokens / workload.layout.micro_batch_size
    if has_experts:
        terms |= _experts(workload)
    else:
        # Gate and up are one tensor (2f); silu(gate), up + offset and their product are 1f each (transformer/mlp.py,
        # glu). Without a gate: input and output of the activation.
        widths = (5 if model.gated_mlp else 2) - (0 if lora is None or _adapted(lora, "down_proj") else 1)
        terms["mlp"] = widths * element * model.ffn_hidden_size / workload.layout.tp * tokens
    if lora is not None:
        terms["adapters"] = element * _low_rank(workload, lora, has_experts) * tokens
    return terms


def _adapted(lora: LoraSpec, *layers: str) -> bool:
    return not lora.layers.isdisjoint(layers)


def _low_rank(workload: Workload, lora: LoraSpec, has_experts: bool) -> int:
    """Elements per token of the adapters' A · input in a layer: the rank for each adapted matrix."""
    model = workload.model
    if lora.target_modules:
        return lora.rank * len(set(lora.target_modules))
    matrices = 2 if model.traits.fused_qkv else 4
    if model.latent is not None:
        matrices = 5 if model.latent.q_lora_rank else 4
    if lora.targets == "all-linear" and not has_experts:
        matrices += 3 if model.gated_mlp and not model.traits.fused_gate_up else 2
    return lora.rank * matrices


def _attention(workload: Workload) -> dict[str, float]:
    """Bytes of attention. The value is a view, which keeps the whole output of the QKV projection alive; query and key
    are copies after RoPE.

    torch's kernels return the output in the query's layout, (sequence, batch, head), so the input of the output
    projection is a view of it.
    """
    model, element = workload.model, workload.element
    heads = model.num_attention_heads / workload.layout.tp
    query = heads * model.head_dim
    key_value = max(model.num_key_value_heads / workload.layout.tp, 1) * model.head_dim
    rotated = 0.0 if model.learned_positions else query + key_value
    inputs, output = rotated + (query + 2 * key_value), query
    shares = workload.layout.cp > 1 and "core_attn" not in workload.recompute_modules
    if shares and workload.layout.cp_comm_type == "p2p":
        # A copy of this rank's keys and values (kernels/ring_attention.py), and the output as the projection reads it.
        inputs = query + 2 * key_value
    elif shares:
        # Keys and values of the whole sequence (context.py), and the output as two halves and as one tensor.
        inputs, output = query + 2 * key_value * workload.layout.cp, 2 * query
    saved = element * (inputs + output)
    if model.traits.qk_norm != "none":
        saved += element * query + 4 * (heads + key_value / model.head_dim)
    return {"attention": saved * workload.tokens, "core_attn": _scores(workload)}


def _scores(workload: Workload) -> float:
    """Bytes of the attention kernel. Fused kernels save the fp32 log-sum-exp. Unfused attention saves the scores after
    the softcap, the fp32 softmax and its 16-bit cast (attention.py, _materialised)."""
    heads = workload.model.num_attention_heads / workload.layout.tp
    if workload.attention != "unfused":
        return 4 * heads * workload.tokens
    return 8 * heads * workload.job.seq_length * workload.tokens


def _latent(workload: Workload, latent: LatentAttention) -> dict[str, float]:
    """Bytes of latent attention (latent.py): compressed states before and after their norms, and concatenated query and
    key heads. The value is a view, which keeps the output of the up-projection alive."""
    heads = workload.model.num_attention_heads / workload.layout.tp
    compressed = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.rope_head_dim
    per_head = 2 * latent.query_head_dim + latent.nope_head_dim + 2 * latent.value_head_dim
    if workload.layout.cp > 1 and "core_attn" not in workload.recompute_modules:
        gathered = (latent.query_head_dim + latent.value_head_dim) * workload.layout.cp
        per_head = latent.query_head_dim + gathered + 2 * latent.value_head_dim
    saved = workload.element * (compressed * workload.shard_tokens + per_head * heads * workload.tokens)
    return {"attention": saved, "core_attn": _scores(workload)}


def _experts(workload: Workload) -> dict[str, float]:
    """Bytes of routed experts under even routing. Per expert of a token: the token's copy (all-gathered over etp) and
    the tensors of a dense MLP; the product with the router's score is one more (mlp.py, per_token_scale)."""
    model, layout = workload.model, workload.layout
    frozen = workload.job.lora is not None
    token = 0.0 if frozen else model.hidden_size * layout.etp / layout.tp
    width = (5 if frozen else 6) * model.moe_ffn_hidden_size / layout.tp
    return {"experts": workload.element * workload.routed_per_token * (token + width) * workload.tokens}


def backward_workspace_bytes(workload: Workload, has_experts: bool) -> float:
    """Peak bytes of temporary gradients in the backward of a layer.

    Dense MLP: gradients of its inner tensors and of two tensors of the hidden size; or of the attention scores, if
    these are larger. Experts run one after the other: the product with the router's scores and its two fp32 gradients
    (mlp.py, per_token_scale); or, after the last expert, four copies of the routed tokens.
    """
    model, element = workload.model, workload.element
    hidden = 2 * element * model.hidden_size * workload.tokens
    if not has_experts:
        width = (3 if model.gated_mlp else 2) * model.ffn_hidden_size / workload.layout.tp
        return hidden + max(element * width * workload.tokens, _scores(workload))
    arrived = workload.shard_tokens * workload.routed_per_token * workload.layout.etp
    token = element * model.hidden_size * arrived
    one_expert = (
        12 * model.moe_ffn_hidden_size / workload.layout.etp * arrived / (model.num_experts / workload.layout.ep)
    )
    return hidden + max(4 * token, one_expert + token)


def local_loss_bytes(workload: Workload, entries: float) -> float:
    """Peak bytes of head and loss. ``entries``: number of logits on this rank.

    The loss needs 16-bit logits and one fp32 copy, on which it computes in place (tensor_parallel/cross_entropy.py).
    The head's backward may need more: gradients of the logits and of the weight (no gradient accumulation fusion), the
    gathered input and its gradient (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """
    element, h = workload.element, workload.model.hidden_size
    table = entries / workload.tokens * h if workload.job.lora is None else 0.0
    head = element * (entries + table + 2 * h * workload.tokens)
    return max((element + (4 if element == 2 else 0)) * entries, head)


def table_gradients(workload: Workload, stage: int) -> float:
    """Bytes of the embedding's gradient at the end of backward, before it is added to the gradient buffer. With a tied
    head on the same stage, the head's gradient and the sum of both exist too."""
    if stage or workload.job.lora is not None:
        return 0.0
    table = -(-workload.model.vocab_size // workload.layout.tp) * workload.model.hidden_size
    return workload.element * table * (3 if workload.model.tied_embeddings and workload.layout.pp == 1 else 1)

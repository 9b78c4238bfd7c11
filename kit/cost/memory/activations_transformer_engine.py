"""What autograd keeps of Megatron's transformer layer with Transformer Engine, in bytes, by operator.

Read in megatron-core 0.16 (transformer/) and transformer_engine/pytorch. ``shard`` counts a token where sequence
parallelism splits it, ``token`` where tensor parallelism has gathered it and splits the width instead (Korthikanti et
al. 2022, arXiv 2205.05198, equations 2 and 4). The layers of megatron-core without Transformer Engine keep the same;
those of kit (local) are in ``activations_megatron.py``.
"""

from __future__ import annotations

from kit.cost.memory import activations_megatron
from kit.cost.setup import Experts, LatentAttention, TrainingSetup

ELEMENT = 2
"""bf16 and fp16 alike."""


def layer_terms(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Bytes that one micro batch keeps of one layer, without recompute. Names are Megatron's recompute modules."""
    if setup.kernels == "local":
        return activations_megatron.layer_terms(setup, has_experts)
    terms = {"residual": _norm_inputs(setup), "layernorm": _norm_outputs(setup), "dropout": _dropout(setup)}
    terms |= _latent(setup, setup.shape.latent) if setup.shape.latent else _attention(setup)
    if has_experts and setup.shape.experts:
        terms |= _experts(setup, setup.shape.experts)
    else:
        terms |= _mlp(setup)
    # Without 16-bit parameters Megatron computes in fp32. fp8 linear layers keep their input in 8 bits
    # (transformer_engine/pytorch/module/linear.py).
    widths = dict.fromkeys(terms, float(setup.weight_bytes)) | {"dropout": float(ELEMENT)}
    if setup.fp8:
        widths |= dict.fromkeys(("layernorm", "attention_output", "moe_act"), 1.0)
    return {name: size * widths[name] / ELEMENT for name, size in terms.items()}


def kept_terms(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Terms that remain under selective recompute, which computes the outputs of the named modules again.
    megatron-core, transformer/transformer_config.py (recompute_modules) and CheckpointWithoutOutput."""
    terms = layer_terms(setup, has_experts)
    if setup.recompute == "selective":
        dropped = setup.recompute_modules or frozenset({"core_attn"})
        terms = {name: size for name, size in terms.items() if name not in dropped}
    return terms


def layer_input(setup: TrainingSetup) -> float:
    """All that full recompute keeps of a layer."""
    return setup.element * setup.shape.hidden_size * setup.shard_tokens


def _norm_inputs(setup: TrainingSetup) -> float:
    statistics = 8 if setup.shape.norm == "layernorm" else 4
    return 2 * (ELEMENT * setup.shape.hidden_size + statistics) * setup.shard_tokens


def _norm_outputs(setup: TrainingSetup) -> float:
    """Inputs of the first linear layers: LayerNormLinear keeps its rank's part and gathers it again in backward."""
    return 2 * ELEMENT * setup.shape.hidden_size * setup.shard_tokens


def _dropout(setup: TrainingSetup) -> float:
    return 2 * setup.shape.hidden_size * setup.shard_tokens if setup.shape.hidden_dropout else 0.0


def _attention(setup: TrainingSetup) -> dict[str, float]:
    """Query, key, value and output of the attention kernel.

    Where rotation or grouped queries leave them in different layouts they are made contiguous and the fused
    projection's result is freed (transformer_engine/pytorch/attention/dot_product_attention/utils.py, get_qkv_layout).
    flash-attn keeps its own output beside the transposed copy that the projection keeps (backends.py, FlashAttention).
    """
    shape, tokens = setup.shape, setup.tokens
    query = shape.query_width / setup.tp
    key_value = max(shape.key_value_width / setup.tp, shape.head_dim)
    kept = ELEMENT * (query + 2 * key_value) * tokens
    if shape.qk_norm:
        kept += (ELEMENT * (query + key_value) + 4 * (query + key_value) / shape.head_dim) * tokens
    outputs = 2 if setup.attention == "flash" else 1
    terms = {"attention": kept, "attention_output": ELEMENT * outputs * query * tokens}
    terms["core_attn"] = _scores(setup)
    return terms


def _scores(setup: TrainingSetup) -> float:
    """Log-sum-exp of fused kernels; unfused: probabilities, and with dropout its mask and result: 5·a·s²."""
    heads = setup.shape.num_attention_heads / setup.tp
    if setup.attention != "unfused":
        return 4 * heads * setup.tokens
    element = ELEMENT + (1 + ELEMENT if setup.shape.attention_dropout else 0)
    return element * heads * setup.seq_length * setup.tokens


def _latent(setup: TrainingSetup, latent: LatentAttention) -> dict[str, float]:
    """megatron-core, transformer/multi_latent_attention.py: compressed states, up-projections, concatenated heads."""
    shape = setup.shape
    heads = shape.num_attention_heads / setup.tp
    compressed = ELEMENT * (latent.kv_lora_rank + latent.rope_head_dim) + ELEMENT * latent.kv_lora_rank
    if latent.q_lora_rank is not None:
        compressed += 2 * ELEMENT * latent.q_lora_rank
    outputs = 2 if setup.attention == "flash" else 1
    per_head = 2 * latent.query_head_dim + latent.value_head_dim
    return {
        "attention": compressed * setup.shard_tokens,
        "mla_up_proj": ELEMENT * per_head * heads * setup.tokens,
        "attention_output": ELEMENT * outputs * latent.value_head_dim * heads * setup.tokens,
        "core_attn": _scores(setup),
    }


def _mlp(setup: TrainingSetup) -> dict[str, float]:
    """Result of the first projection (kept by the fused activation) and of the activation (kept by the second)."""
    shape = setup.shape
    width = (3 if shape.gated_mlp else 2) * shape.ffn_hidden_size / setup.tp
    return {"mlp": ELEMENT * width * setup.tokens}


def _experts(setup: TrainingSetup, moe: Experts) -> dict[str, float]:
    """Dropless experts under even routing: megatron-core, transformer/moe/ (router, token_dispatcher, experts).

    Each token is copied to its experts: input, first projection, activation (weighted by the router's probability, so
    that un-permuting keeps nothing). Tokens that leave and arrive balance over the expert-parallel group.
    """
    shape = setup.shape
    gate = 2 if shape.gated_mlp else 1
    copies = setup.shard_tokens * moe.experts_per_token
    if not setup.sp:
        copies = setup.tokens * moe.experts_per_token / (setup.tp / setup.etp if setup.tp > setup.etp else 1)
    arrived = copies * setup.etp
    width = moe.ffn_hidden_size / setup.etp
    # Only SwiGLU has a fused kernel that weighs by the probability; GELU's result and its product are two tensors.
    results = 1 if shape.gated_mlp else 2
    router = (3 * 4 + 1) * moe.num_experts * setup.shard_tokens
    shared = moe.shared_ffn_hidden_size / setup.tp
    return {
        "router": router,
        "experts": ELEMENT * (shape.hidden_size + gate * width) * arrived,
        "moe_act": ELEMENT * results * width * arrived,
        "shared_experts": ELEMENT * (gate + 1) * shared * setup.tokens,
    }

"""What autograd saves of Megatron's transformer layer with Transformer Engine, in bytes, by operator.

Read in megatron-core 0.16 (transformer/) and transformer_engine/pytorch. ``shard`` counts a token where sequence
parallelism splits it, ``token`` where tensor parallelism has gathered it and splits the width instead (Korthikanti et
al. 2022, arXiv 2205.05198, equations 2 and 4). The layers of megatron-core without Transformer Engine keep the same;
those of kit (local) are in ``activations_megatron.py``.
"""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.specs.model import LatentAttention

ELEMENT = 2
"""bf16 and fp16 alike."""


def layer_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Return the bytes that one micro batch saves of one layer, without recompute, by Megatron's recompute modules."""
    model, shard = workload.model, workload.shard_tokens
    stream = model.hidden_size * shard
    terms = {
        "residual": 2 * (ELEMENT * stream + (8 if model.norm == "layernorm" else 4) * shard),
        # Inputs of the first linear layers: LayerNormLinear saves its rank's part and gathers it again in backward.
        "layernorm": 2 * _input_bytes(workload) * stream,
        "dropout": 2.0 * stream if workload.hidden_dropout else 0.0,
    }
    terms |= _latent(workload, model.latent) if model.latent else _attention(workload)
    terms |= _experts(workload) if has_experts else _mlp(workload)
    # Without 16-bit parameters Megatron computes in fp32.
    widths = dict.fromkeys(terms, float(workload.weight_bytes)) | {"dropout": float(ELEMENT)}
    return {name: size * widths[name] / ELEMENT for name, size in terms.items()}


def _input_bytes(workload: Workload) -> float:
    """Bytes of an element of what a linear layer keeps of its input: in fp8 the 8-bit copy that it multiplies, not the
    16-bit input (transformer_engine/pytorch/module/linear.py, layernorm_linear.py, grouped_linear.py)."""
    return 1.0 if workload.job.precision == "fp8" else float(ELEMENT)


def _attention(workload: Workload) -> dict[str, float]:
    """Query, key, value and output of the attention kernel.

    Where rotation or grouped queries leave them in different layouts they are made contiguous and the fused
    projection's result is freed (transformer_engine/pytorch/attention/dot_product_attention/utils.py, get_qkv_layout).
    """
    model, tokens = workload.model, workload.tokens
    query = model.query_width / workload.layout.tp
    key_value = max(model.key_value_width / workload.layout.tp, model.head_dim)
    saved = ELEMENT * (query + 2 * key_value) * tokens
    if model.traits.qk_norm != "none":
        saved += (ELEMENT * (query + key_value) + 4 * (query + key_value) / model.head_dim) * tokens
    terms = {"attention": saved, "attention_output": _output_bytes(workload) * query * tokens}
    terms["core_attn"] = _scores(workload)
    return terms


def _output_bytes(workload: Workload) -> float:
    """Bytes saved per element of attention's result. A fused kernel keeps the result for its own backward. The
    projection keeps its input: the same tensor with cuDNN's kernel, a transposed copy with flash-attn's (backends.py,
    FlashAttention), or an fp8 copy.
    """
    of_kernel = 0.0 if workload.attention == "unfused" else float(ELEMENT)
    shared = workload.attention == "cudnn" and workload.job.precision != "fp8"
    return of_kernel + (0.0 if shared else _input_bytes(workload))


def _scores(workload: Workload) -> float:
    """Log-sum-exp of fused kernels; unfused: probabilities, and with dropout its mask and result: 5·a·s²."""
    heads = workload.model.num_attention_heads / workload.layout.tp
    if workload.attention != "unfused":
        return 4 * heads * workload.tokens
    element = ELEMENT + (1 + ELEMENT if workload.attention_dropout else 0)
    return element * heads * workload.job.seq_length * workload.tokens


def _latent(workload: Workload, latent: LatentAttention) -> dict[str, float]:
    """megatron-core, transformer/multi_latent_attention.py: compressed states, up-projections, concatenated heads."""
    model = workload.model
    heads = model.num_attention_heads / workload.layout.tp
    of_input = _input_bytes(workload)
    compressed = ELEMENT * (latent.kv_lora_rank + latent.rope_head_dim) + of_input * latent.kv_lora_rank
    if latent.q_lora_rank is not None:
        compressed += (ELEMENT + of_input) * latent.q_lora_rank
    per_head = 2 * latent.query_head_dim + latent.value_head_dim
    return {
        "attention": compressed * workload.shard_tokens,
        "mla_up_proj": ELEMENT * per_head * heads * workload.tokens,
        "attention_output": _output_bytes(workload) * latent.value_head_dim * heads * workload.tokens,
        "core_attn": _scores(workload),
    }


def _mlp(workload: Workload) -> dict[str, float]:
    """Result of the first projection (saved by the fused activation) and of the activation (saved by the second)."""
    model = workload.model
    each = ELEMENT * (2 if model.gated_mlp else 1) + _input_bytes(workload)
    return {"mlp": each * model.ffn_hidden_size / workload.layout.tp * workload.tokens}


def _experts(workload: Workload) -> dict[str, float]:
    """Dropless experts under even routing: megatron-core, transformer/moe/ (router, token_dispatcher, experts).

    Each token is copied to its experts: input, first projection, activation (weighted by the router's probability, so
    that un-permuting saves nothing). Tokens that leave and arrive balance over the expert-parallel group.
    """
    model, tp, etp = workload.model, workload.layout.tp, workload.layout.etp
    gate = 2 if model.gated_mlp else 1
    copies = workload.shard_tokens if workload.layout.sp else workload.tokens / max(1, tp / etp)
    arrived = copies * model.experts_per_token * etp
    width = model.moe_ffn_hidden_size / etp
    of_input = _input_bytes(workload)
    # Only SwiGLU has a fused kernel that weighs by the probability; GELU's result and its product are two tensors.
    results = of_input + (0 if model.gated_mlp else ELEMENT)
    router = (3 * 4 + 1) * model.num_experts * workload.shard_tokens
    shared = model.shared_ffn_hidden_size / tp
    return {
        "router": router,
        "experts": (of_input * model.hidden_size + ELEMENT * gate * width) * arrived,
        "moe_act": results * width * arrived,
        "shared_experts": (ELEMENT * gate + of_input) * shared * workload.tokens,
    }

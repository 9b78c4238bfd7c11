"""Bytes that autograd saves for backward in Megatron's layer with Transformer Engine, by operator.

Read in megatron-core 0.16 (transformer/) and transformer_engine/pytorch. ``shard`` is the number of tokens where
sequence parallelism splits them; ``tokens`` is the number after the all-gather, where tensor parallelism splits the
width (Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 4). megatron-core's own layers without Transformer
Engine save the same; kit's local layers are in ``activations_megatron.py``.
"""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.specs.model import LatentAttention

ELEMENT = 2
"""Bytes of a bf16 or fp16 element."""


def layer_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Bytes that one layer saves for one micro batch, without recompute, by Megatron's recompute modules."""
    model, shard = workload.model, workload.shard_tokens
    stream = model.hidden_size * shard
    terms = {
        "residual": 2 * (ELEMENT * stream + (8 if model.norm == "layernorm" else 4) * shard),
        # Inputs of the first linear layers: LayerNormLinear saves its rank's shard and gathers it again in backward.
        "layernorm": 2 * _input_bytes(workload) * stream,
        "dropout": 2.0 * stream if workload.hidden_dropout else 0.0,
    }
    terms |= _latent(workload, model.latent) if model.latent else _attention(workload)
    terms |= _experts(workload) if has_experts else _mlp(workload)
    # Without 16-bit parameters Megatron computes in fp32.
    widths = dict.fromkeys(terms, float(workload.weight_bytes)) | {"dropout": float(ELEMENT)}
    return {name: size * widths[name] / ELEMENT for name, size in terms.items()}


def _input_bytes(workload: Workload) -> float:
    """Bytes per element of the input that a linear layer saves: in fp8 its 8-bit copy instead of the 16-bit input
    (transformer_engine/pytorch/module/linear.py, layernorm_linear.py, grouped_linear.py)."""
    return 1.0 if workload.job.precision == "fp8" else float(ELEMENT)


def _attention(workload: Workload) -> dict[str, float]:
    """Bytes of query, key, value and output of the attention kernel.

    RoPE and grouped queries give query, key and value different memory layouts. Transformer Engine then makes them
    contiguous, and the output of the fused projection is freed
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py, get_qkv_layout).
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
    """Bytes saved per element of attention's output. A fused kernel saves the output for its own backward, and the
    output projection saves its input: the same tensor with cuDNN's kernel, a transposed copy with flash-attn's
    (backends.py, FlashAttention), or an fp8 copy.
    """
    of_kernel = 0.0 if workload.attention == "unfused" else float(ELEMENT)
    shared = workload.attention == "cudnn" and workload.job.precision != "fp8"
    return of_kernel + (0.0 if shared else _input_bytes(workload))


def _scores(workload: Workload) -> float:
    """Bytes of the attention kernel. Fused kernels save the fp32 log-sum-exp. Unfused attention saves the
    probabilities; with dropout also its mask and output, 5·a·s² in all."""
    heads = workload.model.num_attention_heads / workload.layout.tp
    if workload.attention != "unfused":
        return 4 * heads * workload.tokens
    element = ELEMENT + (1 + ELEMENT if workload.attention_dropout else 0)
    return element * heads * workload.job.seq_length * workload.tokens


def _latent(workload: Workload, latent: LatentAttention) -> dict[str, float]:
    """Bytes of latent attention (megatron-core, transformer/multi_latent_attention.py): compressed states,
    up-projections, concatenated heads."""
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
    """Bytes of an MLP: the fused activation saves the output of the first projection, the second projection its
    input."""
    model = workload.model
    each = ELEMENT * (2 if model.gated_mlp else 1) + _input_bytes(workload)
    return {"mlp": each * model.ffn_hidden_size / workload.layout.tp * workload.tokens}


def _experts(workload: Workload) -> dict[str, float]:
    """Bytes of dropless experts under even routing (megatron-core, transformer/moe: router, token_dispatcher, experts).

    Each expert of a token saves input, output of the first projection, and activation. The activation is multiplied by
    the router's probability, so un-permuting saves nothing. Each rank receives as many tokens as it sends.
    """
    model, tp, etp = workload.model, workload.layout.tp, workload.layout.etp
    gate = 2 if model.gated_mlp else 1
    copies = workload.shard_tokens if workload.layout.sp else workload.tokens / max(1, tp / etp)
    arrived = copies * workload.routed_per_token * etp
    width = model.moe_ffn_hidden_size / etp
    of_input = _input_bytes(workload)
    # Only SwiGLU has a fused kernel with the router's probability; GELU's output and its product are two tensors.
    results = of_input + (0 if model.gated_mlp else ELEMENT)
    router = (3 * 4 + 1) * model.num_experts * workload.shard_tokens
    shared = model.shared_ffn_hidden_size / tp
    return {
        "router": router,
        "experts": (of_input * model.hidden_size + ELEMENT * gate * width) * arrived,
        "moe_act": results * width * arrived,
        "shared_experts": (ELEMENT * gate + of_input) * shared * workload.tokens,
    }

"""What autograd keeps of a transformer layer between forward and backward, term by term.

Bytes per token; the terms are the tensors that the operators of the layer save. All with attention as one operator
(flash, memory-efficient), so there is no term in the square of the sequence. Written beside
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): their 34·sbh is for GELU, a 4h MLP and dropout masks; without
the masks (2·sbh) and with attention as one operator the same terms remain, and fused layers would come to 32·sbh.
A test compares the formulas with the bytes that ``torch.autograd.graph.saved_tensors_hooks`` sees of real layers.

Letters: h hidden size, f MLP width, a·d and k·d widths of query and key/value heads.
"""

from __future__ import annotations

from kit.specs.job import JobSpec, Precision
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def layer_bytes_per_token(model: ModelSpec, job: JobSpec, layout: Layout) -> float:
    """Bytes that one layer keeps per token of a rank's sequence (a ``cp``-th of the whole), without recompute."""
    terms = layer_terms(model, job.precision, layout)
    if layout.implementation == "huggingface-sdpa" and model.windowed(job.seq_length):
        # With a mask, transformers repeats keys and values for all heads (sdpa_attention.py, use_gqa_in_sdpa), and
        # torch makes a bias of the boolean mask in every layer (transformers/attention.cpp, convert_boolean_attn_mask).
        # One head is repeated by a view, but a rotated key is fp32 under autocast and copied by the cast.
        copies = 2 if model.num_key_value_heads > 1 else int(uses_autocast(job.precision, layout))
        repeated = copies * (model.num_attention_heads - model.num_key_value_heads) * model.head_dim
        terms["window"] = (2 if job.precision != "fp32" else 4) * (repeated + job.seq_length)
    return sum(terms.values())


def layer_terms(model: ModelSpec, precision: Precision, layout: Layout) -> dict[str, float]:
    """The same, by operator."""
    if layout.implementation == "torch-native":
        return _torch_native(model, 2 if precision != "fp32" else 4, layout)
    if uses_autocast(precision, layout):
        return _huggingface_autocast(model)
    return _of_a_rank(_huggingface(model, 2 if precision != "fp32" else 4), layout)


def _of_a_rank(terms: dict[str, float], layout: Layout) -> dict[str, float]:
    """DeepSpeed's AutoTP splits what is between two matrices; norms and residuals are whole on every rank."""
    return {name: size / (1 if name == "norms" else layout.tp) for name, size in terms.items()}


def uses_autocast(precision: Precision, layout: Layout) -> bool:
    """Whether fp32 parameters are cast by every matmul: the torch engine, except where FSDP2 gathers them in bf16, and
    DeepSpeed on request."""
    return layout.autocast or (precision != "fp32" and layout.engine == "torch" and layout.zero_stage == 0)


def layer_input_bytes_per_token(model: ModelSpec, job: JobSpec, layout: Layout) -> float:
    """Bytes of a layer's input, all that full recompute keeps: a part of it under sequence parallelism.

    Under autocast the residual stream stays fp32: embeddings are not cast.
    """
    element = 2 if job.precision != "fp32" and not uses_autocast(job.precision, layout) else 4
    return element * model.hidden_size / (layout.tp if layout.sp else 1)


def logits_bytes_per_token(model: ModelSpec, job: JobSpec, layout: Layout) -> float:
    """Peak of the output projection's result and the loss, per token.

    Hugging Face models with torch's cross entropy: fp32 log-probabilities, their gradient, and the gradient of the
    logits exist together in backward (4 + 4 + 4 bytes a token and vocabulary entry). megatron-core
    (tensor_parallel/cross_entropy.py) works in place on one fp32 copy beside the bf16 logits, split over tp.
    """
    if layout.implementation == "torch-native":
        return -(-model.vocab_size // layout.tp) * (6 if job.precision != "fp32" else 4)
    return model.vocab_size * 12


def working_bytes_per_token(model: ModelSpec, job: JobSpec, layout: Layout) -> float:
    """Gradients of a layer's intermediate results that exist at once, in the backward of the MLP.

    Three of its width (product, gate and up), two of the hidden size.
    """
    element = 2 if job.precision != "fp32" else 4
    return element * max(1, model.experts_per_token) * (3 * model.mlp_width / layout.tp + 2 * model.hidden_size)


def _huggingface(model: ModelSpec, element: int) -> dict[str, float]:
    """transformers' modeling_llama.py, modeling_qwen3.py, modeling_gpt2.py in one dtype of ``element`` bytes."""
    h, f = model.hidden_size, model.ffn_hidden_size
    query, key_value = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    if model.family == "gpt2":
        # Input, mean, reciprocal deviation and output of LayerNorm; gelu_new is seven operators and keeps four results.
        return {
            "norms": 2 * (2 * element * h + 2 * element),
            "attention": element * (query + 2 * key_value) + element * query + 4 * model.num_attention_heads,
            "mlp": 5 * element * f,
        }
    attention = element * (2 * query + 2 * key_value) + 4 * model.num_attention_heads
    if model.family == "phi3":
        # The value is a view of the fused projection, which stays whole; the heads' output is copied to be joined.
        attention += element * (2 * query + key_value)
    qk_norm = (4 + (element if element == 2 else 4)) * (query + key_value) if model.qk_norm else 0
    qk_rms = 4 * (model.num_attention_heads + model.num_key_value_heads) if model.qk_norm else 0
    return {
        # RMSNorm computes in fp32: x, then x/rms in the model's dtype, then the scaled result that the matmuls keep.
        "norms": 2 * (4 * h + 2 * element * h + 4),
        "qk_norm": qk_norm + qk_rms,
        # Rotated query and key, value, output, and the fp32 log-sum-exp of each head.
        "attention": attention,
        # gate, silu(gate), up, their product
        "mlp": _routed(model, element) if model.num_experts else 4 * element * f,
    }


def _huggingface_autocast(model: ModelSpec) -> dict[str, float]:
    """The same layers with fp32 parameters under torch.autocast(bfloat16).

    The residual stream and the norms are fp32; every matmul casts its own input (autocast caches casts of parameters,
    not of activations), so query, key and value keep three copies and gate and up two.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    query, key_value = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    if model.family == "gpt2":
        return {
            "norms": 2 * (4 * h + 2 * h + 8),
            "attention": 2 * (query + 2 * key_value) + 2 * query + 4 * model.num_attention_heads,
            # On CUDA pow is on autocast's fp32 list (aten/src/ATen/autocast_mode.h), so its input and what follows
            # (tanh, 1 + tanh) are fp32; input/2 and the result cast for the next matmul are bf16.
            "mlp": (4 + 4 + 4 + 2 + 2) * f,
        }
    attention = 2 * (2 * query + 2 * key_value) + 4 * model.num_attention_heads
    casts = 3 * 2 * h + 2 * 2 * h
    if model.family == "phi3":  # fused projections: see _huggingface; and one cast for each
        attention += 2 * (2 * query + key_value)
        casts = 2 * 2 * h
    if model.num_experts:
        casts = 3 * 2 * h + 2 * h  # the router casts once
    qk_norm = 6 * (query + key_value) if model.qk_norm else 0
    qk_rms = 4 * (model.num_attention_heads + model.num_key_value_heads) if model.qk_norm else 0
    return {
        "norms": 2 * (4 * h + 4 * h + 4),
        "casts": casts,
        "qk_norm": qk_norm + qk_rms,
        "attention": attention,
        "mlp": _routed(model, 4) if model.num_experts else 4 * 2 * f,
    }


def _routed(model: ModelSpec, element: int) -> float:
    """Experts of transformers (integrations/moe.py, grouped_mm_experts_forward), for each expert of a token.

    The token's copy, what a dense MLP keeps, and the result before it is weighted. Indices and scores are left out:
    some 100 bytes a token. Autocast does not know grouped products: experts stay in fp32 under it.
    """
    return element * model.experts_per_token * (2 * model.hidden_size + 4 * model.moe_ffn_hidden_size)


def _torch_native(model: ModelSpec, element: int, layout: Layout) -> dict[str, float]:
    """megatron-core's layer without Transformer Engine (kit/engines/megatron/layers.py), fused norms of CUDA.

    Tensor parallelism splits attention and MLP; sequence parallelism splits the rest too (Korthikanti et al., eq. 4):
    ColumnParallelLinear keeps its input split and gathers it again in backward (tensor_parallel/layers.py).
    """
    tp, outer = layout.tp, layout.tp if layout.sp else 1
    h, f = model.hidden_size / outer, model.ffn_hidden_size / tp
    heads = model.num_attention_heads / tp
    query = heads * model.head_dim
    key_value = max(model.num_key_value_heads / tp, 1) * model.head_dim
    statistics = 4 if model.norm == "rmsnorm" else 8
    # The value is a view of the whole projection's output, which therefore stays; query and key are rotated copies.
    inputs = query + key_value + (query + 2 * key_value)
    output, sums = query, 4 * heads
    if layout.recompute == "selective":
        sums = 0
    elif layout.cp > 1 and layout.cp_comm_type == "p2p":
        # A copy of this rank's keys and values (ring.py), and the output once for each order of its dimensions.
        inputs, output = query + 2 * key_value, 2 * query
    elif layout.cp > 1:
        # Keys and values of the whole sequence instead (context.py), and both halves of the output beside their sum.
        inputs, output = query + 2 * key_value * layout.cp, 2 * query
    attention = element * (inputs + output) + sums
    if model.qk_norm:
        attention += element * query + 4 * (heads + key_value / model.head_dim)
    # Gate and up are one tensor (2f); silu(gate), up + offset and the product are one each (transformer/mlp.py, glu).
    mlp = 5 * element * f if model.gated_mlp else 3 * element * f
    if model.num_experts:
        # For each expert of a token, when experts are equally popular: the token's copy, gathered where experts are
        # cut, and one product more, with the router's score (mlp.py, per_token_scale).
        token = model.hidden_size * layout.etp / tp
        mlp = element * model.experts_per_token * (token + 6 * model.moe_ffn_hidden_size / tp)
    return {
        "norms": 2 * (2 * element * h + statistics / outer),
        "attention": attention,
        # cos and sin of query and of key, cast anew in each layer (rope_utils.py), shared by a micro batch's sequences
        "rope": 0 if model.learned_positions else 4 * element * model.head_dim / layout.micro_batch_size,
        "mlp": mlp,
    }

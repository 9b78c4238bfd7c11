"""What autograd keeps of a transformers layer between forward and backward, term by term.

Bytes per token; the terms are the tensors that the operators of the layer save, read in transformers' model files. All
with attention as one operator (torch's sdpa), so no term grows with the square of the sequence but that of a mask.
Written beside Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): their 34·sbh is for GELU, a 4h MLP and dropout
masks; without the masks (2·sbh) and with attention as one operator the same terms remain, and fused layers would come
to 32·sbh. A test compares the formulas with what ``torch.autograd.graph.saved_tensors_hooks`` sees of real layers.
"""

from __future__ import annotations

from kit.cost.setup import Shape, TrainingSetup

LOSS_BYTES = 12.0
"""torch's cross entropy on fp32 logits in backward: log-probabilities, their gradient, and that of the logits."""


def layer_bytes(setup: TrainingSetup, has_experts: bool) -> float:
    """Of one micro batch and layer, without recompute."""
    return sum(layer_terms(setup, has_experts).values()) * setup.tokens


def layer_terms(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Bytes per token, by operator."""
    terms = _autocast(setup, has_experts) if setup.autocast else _one_dtype(setup, has_experts)
    shape = setup.shape
    if shape.sliding_window is not None and shape.sliding_window < setup.seq_length:
        # With a mask, transformers repeats keys and values for all heads (sdpa_attention.py, use_gqa_in_sdpa), and
        # torch makes a bias of the boolean mask in every layer (transformers/attention.cpp, convert_boolean_attn_mask).
        # One head is repeated by a view, but a rotated key is fp32 under autocast and copied by the cast.
        copies = 2 if shape.num_key_value_heads > 1 else int(setup.autocast)
        repeated = copies * (shape.num_attention_heads - shape.num_key_value_heads) * shape.head_dim
        share = 1 - 1 / shape.full_attention_every if shape.full_attention_every else 1.0
        terms["window"] = share * setup.element * (repeated / setup.tp + setup.seq_length)
    return terms


def layer_input(setup: TrainingSetup) -> float:
    """Bytes of a micro batch at a layer's input, all that full recompute keeps.

    Under autocast the residual stream stays fp32: embeddings are not cast.
    """
    return _stream(setup) * setup.shape.hidden_size * setup.tokens


def after_layers(setup: TrainingSetup) -> float:
    """The final norm, whose result is the head's input: bytes of a micro batch."""
    shape = setup.shape
    norm = _norm(shape, setup.element) if not setup.autocast else 8 * shape.hidden_size + 4
    cast = 2 * shape.hidden_size if setup.autocast else 0
    return (norm + cast) * setup.tokens


def _stream(setup: TrainingSetup) -> int:
    return 4 if setup.autocast else setup.element


def _norm(shape: Shape, element: int) -> float:
    """RMSNorm computes in fp32: x, then x/rms in the model's dtype, then the scaled result that the matmuls keep."""
    h = shape.hidden_size
    return 4 * h + 2 * element * h + 4 if shape.norm == "rmsnorm" else 2 * element * h + 2 * element


def _one_dtype(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """modeling_llama.py, modeling_qwen3.py, modeling_gpt2.py and their like."""
    shape, element, tp = setup.shape, setup.element, setup.tp
    f = shape.ffn_hidden_size / tp
    query, key_value = shape.query_width / tp, shape.key_value_width / tp
    heads = shape.num_attention_heads / tp
    terms = {"norms": 2 * _norm(shape, element), "core_attn": 4 * heads}
    if shape.family == "gpt2":
        # The fused projection stays whole behind its views; gelu_new is seven operators and keeps four results.
        return terms | {"attention": element * (2 * query + 2 * key_value), "mlp": 5 * element * f}
    # Rotated query and key, value, output.
    attention = element * (2 * query + 2 * key_value)
    if shape.family == "phi3":
        # The value is a view of the fused projection, which stays whole; the heads' output is copied to be joined.
        attention += element * (2 * query + key_value)
    if shape.qk_norm:
        terms["qk_norm"] = (4 + element) * (query + key_value) + 4 * (heads + shape.num_key_value_heads / tp)
    # gate, silu(gate), up, their product
    return terms | {"attention": attention, "mlp": _routed(setup, element) if has_experts else 4 * element * f}


def _autocast(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """The same layers with fp32 parameters under torch.autocast.

    The residual stream and the norms are fp32; every matmul casts its own input (autocast caches casts of parameters,
    not of activations), so query, key and value keep three copies and gate and up two.
    """
    shape, tp = setup.shape, setup.tp
    h, f = shape.hidden_size, shape.ffn_hidden_size / tp
    query, key_value = shape.query_width / tp, shape.key_value_width / tp
    heads = shape.num_attention_heads / tp
    if shape.family == "gpt2":
        return {
            "norms": 2 * (4 * h + 2 * h + 8),
            "attention": 2 * (query + 2 * key_value) + 2 * query,
            "core_attn": 4 * heads,
            # On CUDA pow is on autocast's fp32 list (aten/src/ATen/autocast_mode.h), so its input and what follows
            # (tanh, 1 + tanh) are fp32; input/2 and the result cast for the next matmul are bf16.
            "mlp": (4 + 4 + 4 + 2 + 2) * f,
        }
    attention = 2 * (2 * query + 2 * key_value)
    casts = 3 * 2 * h + 2 * 2 * h
    if shape.family == "phi3":  # fused projections: see _one_dtype; and one cast for each
        attention += 2 * (2 * query + key_value)
        casts = 2 * 2 * h
    if has_experts:
        casts = 3 * 2 * h + 2 * h  # the router casts once
    terms = {"norms": 2.0 * (4 * h + 4 * h + 4), "casts": float(casts), "attention": attention, "core_attn": 4 * heads}
    if shape.qk_norm:
        terms["qk_norm"] = 6 * (query + key_value) + 4 * (heads + shape.num_key_value_heads / tp)
    return terms | {"mlp": _routed(setup, 4) if has_experts else 4 * 2 * f}


def _routed(setup: TrainingSetup, element: int) -> float:
    """Experts of transformers (integrations/moe.py, grouped_mm_experts_forward), for each expert of a token.

    The token's copy, what a dense MLP keeps, and the result before it is weighted. Indices and scores are left out:
    some 100 bytes a token. Autocast does not know grouped products: experts stay in fp32 under it.
    """
    moe = setup.shape.experts
    assert moe is not None
    return element * moe.experts_per_token * (2 * setup.shape.hidden_size + 4 * moe.ffn_hidden_size)

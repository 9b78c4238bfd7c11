"""What autograd keeps of a transformers layer between forward and backward, term by term.

Bytes per token; the terms are the tensors that the operators of the layer save, read in transformers' model files. All
with attention as one operator (torch's sdpa), so no term grows with the square of the sequence but that of a mask; and
the scores of families that have no such operator (``fused_attention`` of kit/specs/families.py).
Written beside Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): their 34·sbh is for GELU, a 4h MLP and dropout
masks; without the masks (2·sbh) and with attention as one operator the same terms remain, and fused layers would come
to 32·sbh. A test compares the formulas with what ``torch.autograd.graph.saved_tensors_hooks`` sees of real layers.
"""

from __future__ import annotations

from kit.cost.setup import Shape, TrainingSetup
from kit.specs.families import FAMILIES, Traits

FUSED_QKV = ("phi3", "gpt2", "gpt_neox", "bloom", "falcon")
"""Families with one projection for query, key and value, and so one cast of its input under autocast."""
WHOLE_PROJECTION = ("phi3", "gpt_neox")
"""Of these: the value is a view of the projection's result, which stays whole beside the rotated query and key, and the
heads' output is copied to be joined. GPT-2's query and key are views too; BLOOM and Falcon copy all three."""
FP32_SCALE = ("gemma", "gemma2", "gemma3_text", "olmo2", "gpt_oss")
"""Families whose RMSNorm multiplies by its weight before it goes back to 16 bits."""

LOSS_BYTES = 12.0
"""torch's cross entropy on fp32 logits in backward: log-probabilities, their gradient, and that of the logits."""


def layer_bytes(setup: TrainingSetup, has_experts: bool) -> float:
    """Of one micro batch and layer, without recompute."""
    return sum(layer_terms(setup, has_experts).values()) * setup.tokens


def layer_terms(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Bytes per token, by operator."""
    traits = traits_of(setup.shape)
    mlp = _routed(setup, traits) if has_experts else _mlp(setup, traits)
    terms = _norms(setup, traits) | _attention(setup, traits) | {"mlp": mlp}
    if setup.autocast:
        terms["casts"] = _casts(setup, traits, has_experts)
    return terms | _mask(setup, traits)


def layer_input(setup: TrainingSetup) -> float:
    """Bytes of a micro batch at a layer's input, all that full recompute keeps.

    Under autocast the residual stream stays fp32: embeddings are not cast.
    """
    return _stream(setup) * setup.shape.hidden_size * setup.tokens


def after_layers(setup: TrainingSetup) -> float:
    """The final norm, whose result is the head's input: bytes of a micro batch."""
    shape, traits = setup.shape, traits_of(setup.shape)
    if setup.autocast:
        return (8 * shape.hidden_size + 4 + 2 * shape.hidden_size) * setup.tokens
    return (_norm(setup, traits) + _norm_result(setup, traits)) * setup.tokens


def traits_of(shape: Shape) -> Traits:
    """Of the family; of a Llama where a description names none."""
    return FAMILIES[shape.family or "llama"]


def _stream(setup: TrainingSetup) -> int:
    return 4 if setup.autocast else setup.element


def _norm(setup: TrainingSetup, traits: Traits) -> float:
    """What a norm keeps for itself.

    RMSNorm computes in fp32: x, then x/rms, in the model's dtype again where the weight multiplies it there.
    LayerNorm is one operator: its input and two statistics.
    """
    h, element = setup.shape.hidden_size, 4 if setup.autocast else setup.element
    if traits.norm == "layernorm":
        return element * h + 2 * element
    normed = 4 if setup.shape.family in FP32_SCALE else element
    return (4 + normed) * h + 4


def _norm_result(setup: TrainingSetup, traits: Traits) -> float:
    """The input of the matrices that follow; under autocast they keep casts of it instead (``_casts``)."""
    return 0 if setup.autocast else setup.element * setup.shape.hidden_size


def _norms(setup: TrainingSetup, traits: Traits) -> dict[str, float]:
    """Around attention and MLP, and what both matrices read."""
    shape = setup.shape
    around = 4 if traits.norm_placement == "both" else 1 if shape.parallel_residual else 2
    inputs = 1 if shape.parallel_residual else 2
    total = around * _norm(setup, traits) + inputs * _norm_result(setup, traits)
    if shape.shared_input and around == 2:  # both norms keep one and the same input
        total -= _stream(setup) * shape.hidden_size
    terms = {"norms": float(total)}
    if traits.qk_norm != "none" and shape.latent is None:
        widths = (shape.query_width + shape.key_value_width) / setup.tp
        count = 2 if traits.qk_norm == "width" else (shape.num_attention_heads + shape.num_key_value_heads) / setup.tp
        # Under autocast the projection's 16-bit result is taken to fp32 and its norm back.
        second = 4 if shape.family in FP32_SCALE else 2 if setup.autocast else setup.element
        terms["qk_norm"] = (4 + second) * widths + 4 * count
    return terms


def _attention(setup: TrainingSetup, traits: Traits) -> dict[str, float]:
    """Rotated query and key, value, output; and the fp32 log-sum-exp of each head, or its scores."""
    shape, tp = setup.shape, setup.tp
    element = 2 if setup.autocast else setup.element
    query, key_value = shape.query_width / tp, shape.key_value_width / tp
    heads = shape.num_attention_heads / tp
    if shape.latent is not None:
        return {"attention": _latent(setup, element), "core_attn": 4 * heads}
    # transformers repeats keys and values of eager attention, and Falcon always.
    repeated = not traits.fused_attention or shape.family == "falcon"
    widths = 2 * query + 2 * (query if repeated else key_value)
    if shape.family in WHOLE_PROJECTION:
        widths += 2 * query + key_value
    core = 4 * heads
    if not traits.fused_attention:
        # The softmax's fp32 result and its 16-bit copy; gpt-oss computes it in 16 bits, but for autocast, with a column
        # for the sink and the place of the largest score. A cap keeps its tanh.
        softmax = element if traits.attention_sinks and not setup.autocast else 4
        copy = element if softmax != element else 0
        capped = element if shape.softcap else 0
        core = heads * setup.seq_length * (softmax + copy + capped)
        core += heads * (softmax + 8) if traits.attention_sinks else 0
    return {"attention": element * widths, "core_attn": core}


def _latent(setup: TrainingSetup, element: int) -> float:
    """modeling_deepseek_v3.py: compressed states with their norms, concatenated query and key of every head, the whole
    up-projection behind the value, and the output."""
    shape, latent = setup.shape, setup.shape.latent
    assert latent is not None
    heads = shape.num_attention_heads / setup.tp
    ranks = latent.kv_lora_rank + (latent.q_lora_rank or 0)
    compressed = (4 + 2 * element) * ranks + 4 * (2 if latent.q_lora_rank else 1)
    up = heads * (latent.nope_head_dim + latent.value_head_dim)
    return compressed + element * (2 * heads * latent.query_head_dim + up + heads * latent.value_head_dim)


def _mlp(setup: TrainingSetup, traits: Traits) -> float:
    element, f = (2 if setup.autocast else setup.element), setup.shape.ffn_hidden_size / setup.tp
    if setup.shape.gated_mlp:
        return 4 * element * f  # gate, its activation, up, their product
    if setup.shape.family == "gpt2":
        # gelu_new is seven operators and keeps four results. On CUDA pow is on autocast's fp32 list
        # (aten/src/ATen/autocast_mode.h), so its input and what follows (tanh, 1 + tanh) are fp32; input/2 and the
        # result cast for the next matmul are 16-bit.
        return (4 + 4 + 4 + 2 + 2) * f if setup.autocast else 5 * element * f
    return (1 if traits.activation == "relu" else 2) * element * f  # relu's result is all that it needs


def _casts(setup: TrainingSetup, traits: Traits, has_experts: bool) -> float:
    """Under torch.autocast every matmul casts its own input (casts of parameters are cached, those of activations are
    not), so query, key and value keep three copies and gate and up two; the router casts once."""
    fused = setup.shape.family in FUSED_QKV
    of_mlp = 1 if has_experts or not setup.shape.gated_mlp or setup.shape.family == "phi3" else 2
    return 2.0 * setup.shape.hidden_size * ((1 if fused else 3) + of_mlp)


def _mask(setup: TrainingSetup, traits: Traits) -> dict[str, float]:
    """With a mask, transformers repeats keys and values for all heads (sdpa_attention.py, use_gqa_in_sdpa), and torch
    makes a bias of the boolean mask in every layer (transformers/attention.cpp, convert_boolean_attn_mask).

    One head is repeated by a view, but a rotated key is fp32 under autocast and copied by the cast. Falcon always gives
    a mask.
    """
    shape = setup.shape
    if shape.family == "falcon":
        return {"mask": setup.element * setup.seq_length}
    if not traits.fused_attention or shape.sliding_window is None or shape.sliding_window >= setup.seq_length:
        return {}
    copies = 2 if shape.num_key_value_heads > 1 else int(setup.autocast)
    repeated = copies * (shape.num_attention_heads - shape.num_key_value_heads) * shape.head_dim
    share = 1 - 1 / shape.full_attention_every if shape.full_attention_every else 1.0
    return {"window": share * setup.element * (repeated / setup.tp + setup.seq_length)}


def _routed(setup: TrainingSetup, traits: Traits) -> float:
    """Experts of transformers (integrations/moe.py, grouped_mm_experts_forward), for each expert of a token.

    The token's copy, what a dense MLP keeps, and the result before it is weighted. Indices and scores are left out:
    some 100 bytes a token. Autocast does not know grouped products: experts stay in fp32 under it. gpt-oss keeps seven
    of an expert's widths: the projection's, and what clamping, scaling and the sigmoid make of it.
    """
    moe, element = setup.shape.experts, 4 if setup.autocast else setup.element
    assert moe is not None
    widths = 7 if traits.activation == "clamped_swiglu" else 4
    shared = 4 * (2 if setup.autocast else element) * moe.shared_ffn_hidden_size / setup.tp
    return element * moe.experts_per_token * (2 * setup.shape.hidden_size + widths * moe.ffn_hidden_size) + shared

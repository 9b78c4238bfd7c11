"""What autograd keeps of a transformers layer between forward and backward, term by term.

Bytes per token; the terms are the tensors that the operators of the layer save, read in transformers' model files. All
with attention as one operator (torch's sdpa), so no term grows with the square of the sequence but that of a mask.
Written beside Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): their 34·sbh is for GELU, a 4h MLP and dropout
masks; without the masks (2·sbh) and with attention as one operator the same terms remain, and fused layers would come
to 32·sbh. A test compares the formulas with what ``torch.autograd.graph.saved_tensors_hooks`` sees of real layers.
"""

from __future__ import annotations

from kit.cost.memory.activations_frozen import with_frozen_weights, without_scale
from kit.cost.setup import Experts, LatentAttention, Shape, TrainingSetup
from kit.specs.families import Traits

LOSS_BYTES = 12.0
"""torch's cross entropy on fp32 logits in backward: log-probabilities, their gradient, and that of the logits."""


def loss_bytes(setup: TrainingSetup) -> float:
    """Fullest moment of head and loss; capped logits keep their tanh.

    Chunked (kit/engines/kernels/chunked_loss.py): logits of a chunk in the compute dtype and in fp32, the capped
    ones' slope;
    of all tokens the gradient of the head's input; and the head's gradient in fp32 with a product in 16 bits.
    """
    if setup.chunked_loss:
        shape, trained = setup.shape, setup.lora is None
        copies = 4 + (setup.element if setup.element < 4 else 0) + (4 if shape.capped_logits else 0)
        if setup.liger_loss:
            copies = setup.element  # their gradient takes their place
        of_weight = 4 + (setup.element if setup.element < 4 else 0) if trained else 0
        of_input = (4 if setup.autocast else setup.element) * shape.hidden_size * setup.tokens
        return copies * chunk_entries(setup) + of_weight * shape.vocab_size * shape.hidden_size + of_input
    capped = setup.element if setup.shape.capped_logits else 0
    return (LOSS_BYTES + capped) * setup.shape.vocab_size * setup.tokens


def chunk_entries(setup: TrainingSetup) -> float:
    """Logits that exist at once."""
    tokens = setup.chunk_tokens if setup.chunked_loss else setup.tokens
    return setup.shape.vocab_size * tokens


def layer_bytes(setup: TrainingSetup, has_experts: bool) -> float:
    """Bytes that one layer saves for backward per micro batch, without recompute."""
    return sum(layer_terms(setup, has_experts).values()) * setup.tokens


def layer_terms(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Bytes per token, by operator."""
    shape = setup.shape
    if setup.lora is not None:
        # The frozen weights are in 16 bits, so the stream is too, autocast or not.
        terms = with_frozen_weights(setup, has_experts, _one_dtype(setup, has_experts))
    else:
        terms = _autocast(setup, has_experts) if setup.autocast else _one_dtype(setup, has_experts)
    if shape.sliding_window is not None and shape.sliding_window <= setup.seq_length and _traits(shape).fused_attention:
        # A mask is made from the window's own length on (masking_utils.py, _ignore_causal_mask_sdpa). With one,
        # transformers repeats keys and values for all heads (sdpa_attention.py, use_gqa_in_sdpa), and
        # torch makes a bias of the boolean mask in every layer (transformers/attention.cpp, convert_boolean_attn_mask).
        # One head is repeated by a view, but a rotated key is fp32 under autocast and copied by the cast.
        copies = 2 if shape.num_key_value_heads > 1 else int(setup.autocast)
        repeated = copies * (shape.num_attention_heads - shape.num_key_value_heads) * shape.head_dim
        share = 1 - 1 / shape.full_attention_every if shape.full_attention_every else 1.0
        terms["window"] = share * setup.element * (repeated / setup.tp + setup.seq_length)
    if _traits(shape).positions == "relative":
        # T5's learned bias, alike for all sequences: a decoder's layers each cut the future off a copy of their own
        # (sdpa_attention.py, create_position_bias_mask), others share one.
        share = shape.cross_attention_layers / shape.num_layers
        a_position = setup.element * shape.num_attention_heads + 1
        terms["bias"] = share * a_position * setup.seq_length / setup.micro_batch_size
    return terms


def cross_attention(setup: TrainingSetup) -> float:
    """Terms of a decoder layer's attention to the encoder: those of self-attention once more, with their norm. Source
    and target are taken as equally long."""
    terms = layer_terms(setup, False)
    own = sum(size for name, size in terms.items() if name not in ("norms", "mlp", "window", "bias"))
    return (own + terms["norms"] / 2) * setup.tokens


def layer_input(setup: TrainingSetup) -> float:
    """Bytes of a micro batch at a layer's input, all that full recompute keeps.

    Under autocast the residual stream stays fp32: embeddings are not cast.
    """
    fp32 = setup.autocast and setup.lora is None
    return (4 if fp32 else setup.element) * setup.shape.hidden_size * setup.tokens


def after_layers(setup: TrainingSetup) -> float:
    """The final norm, whose result is the head's input: bytes of a micro batch."""
    h, element = setup.shape.hidden_size, setup.element
    if setup.lora is not None:
        return without_scale(setup.shape, h, element) * setup.tokens
    if setup.autocast:
        return (_inside_norm(setup.shape, h, 4) + 4 * h + 2 * h) * setup.tokens
    return (_inside_norm(setup.shape, h, element) + element * h) * setup.tokens


def _traits(shape: Shape) -> Traits:
    return shape.traits or Traits(norm=shape.norm, gated_mlp=shape.gated_mlp)


def _inside_norm(shape: Shape, width: float, element: int) -> float:
    """What a norm keeps beside its result, per token.

    LayerNorm: its input and two statistics. RMSNorm computes in fp32: the input, and what the scale multiplies, in the
    model's dtype (modeling_llama.py), or in fp32 (modeling_gemma.py scales by 1 + weight; modeling_olmo2.py and
    modeling_gpt_oss.py before the cast).
    """
    if shape.norm == "layernorm":
        return element * width + 2 * element
    traits = _traits(shape)
    in_fp32 = traits.zero_centred_norm or traits.norm_placement == "output" or shape.family == "gpt_oss"
    scaled = 4 if in_fp32 else element
    # T5 multiplies its input itself by the root, not the fp32 copy that the root was computed of (modeling_t5.py).
    uncast = element if shape.family == "t5" and element < 4 else 0
    return (4 + scaled + uncast) * width + 4


def _norms(setup: TrainingSetup, element: int) -> float:
    """Bytes per token around attention and MLP: what norms save, and their outputs (or the residual stream), which the
    linear layers save as inputs."""
    shape, h = setup.shape, setup.shape.hidden_size
    traits = _traits(shape)
    inside = _inside_norm(shape, h, element)
    if shape.parallel_residual:
        # One input, which both norms keep, or one norm for both.
        return inside + element * h * (1 if shape.shared_norm else 2) + (0 if shape.shared_norm else 2 * element)
    return inside * (4 if traits.norm_placement == "both" else 2) + 2 * element * h


def _one_dtype(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Everything in ``element`` bytes: DeepSpeed's 16-bit models, FSDP2's, and fp32."""
    shape, element = setup.shape, setup.element
    terms = {"norms": _norms(setup, element)}
    terms |= _latent(setup, shape.latent) if shape.latent else _attention(setup)
    if has_experts and shape.experts is not None:
        return terms | _experts(setup, shape.experts, element)
    return terms | {"mlp": _mlp(shape, shape.ffn_hidden_size / setup.tp, element)}


FUSED_PROJECTIONS = ("gpt2", "gpt_neox", "phi3", "bloom")
"""Families whose query, key and value are one product, which stays whole behind its views."""


def _attention(setup: TrainingSetup) -> dict[str, float]:
    """Query and key (rotated copies, where they rotate), value, output."""
    shape, element, tp = setup.shape, setup.element, setup.tp
    query, key_value = shape.query_width / tp, shape.key_value_width / tp
    heads = shape.num_attention_heads / tp
    traits = _traits(shape)
    kept = element * (2 * query + 2 * key_value)
    if shape.family in FUSED_PROJECTIONS and traits.positions == "rope":
        # The heads' output is copied to be joined.
        kept += element * (2 * query + key_value)
    terms = {"attention": kept, "core_attn": 4 * heads}
    if shape.family == "falcon":
        return terms | _falcon(setup, query, key_value, heads)
    if not traits.fused_attention:
        # Eager: fp32 probabilities, their 16-bit copy, and the capped scores' tanh; keys and values of all heads. With
        # sinks the softmax stays in the model's dtype, but for autocast, and has a column and a largest score more.
        capped = element if shape.family == "gemma2" else 0
        softmax = element if traits.attention_sinks and not setup.autocast else 4
        copy = element if element != softmax else 0
        terms["core_attn"] = (softmax + copy + capped) * heads * setup.seq_length
        terms["core_attn"] += (softmax + 8) * heads if traits.attention_sinks else 0
        terms["attention"] += element * 2 * (query - key_value)
    if traits.qk_norm == "head":
        # Llama's rule keeps the scaled result in the model's dtype, Gemma's in fp32.
        scaled = 4 if traits.zero_centred_norm else element
        terms["qk_norm"] = (4 + scaled) * (query + key_value) + 4 * (heads + shape.num_key_value_heads / tp)
    elif traits.qk_norm == "width":
        terms["qk_norm"] = 8 * (query + key_value) + 8
    return terms


def _falcon(setup: TrainingSetup, query: float, key_value: float, heads: float) -> dict[str, float]:
    """modeling_falcon.py hands sdpa one key for all heads, which only torch's math kernel takes: fp32 probabilities and
    fp32 copies of query, key and value; or, in the newer layout, keys and values copied for all heads, and a mask."""
    if setup.shape.num_key_value_heads == 1:
        copies = 4 * (query + 2 * key_value) + setup.element * query
        return {"attention": copies, "core_attn": 4 * heads * setup.seq_length}
    return {"attention": setup.element * 4 * query, "window": float(setup.element * setup.seq_length)}


def _latent(setup: TrainingSetup, latent: LatentAttention) -> dict[str, float]:
    """modeling_deepseek_v2.py: compressed states and their norms; heads joined from both parts; value a view of the
    up-projection, which stays whole."""
    shape, element, tp = setup.shape, setup.element, setup.tp
    heads = shape.num_attention_heads / tp
    ranks = latent.kv_lora_rank + (latent.q_lora_rank or 0)
    joined = 2 * heads * latent.query_head_dim
    up = heads * (latent.nope_head_dim + latent.value_head_dim)
    return {
        "latent": (4 + 2 * element) * ranks + 8,
        "attention": element * (joined + up + heads * latent.value_head_dim),
        "core_attn": 4 * heads,
    }


def _mlp(shape: Shape, width: float, element: int) -> float:
    """Gate, its activation, up, and the product; without a gate the activation's input and result."""
    if shape.gated_mlp:
        # T5's gate is gelu_new, as GPT-2's activation below: three results more.
        return (7 if shape.family == "t5" else 4) * element * width
    if shape.family == "gpt2":
        return 5 * element * width  # gelu_new is seven operators and keeps four results
    # A rectifier needs its result alone.
    return (1 if _traits(shape).activation == "relu" else 2) * element * width


def _experts(setup: TrainingSetup, moe: Experts, element: int) -> dict[str, float]:
    """Experts of transformers (integrations/moe.py, grouped_mm_experts_forward), for each expert of a token.

    The token's copy, what a dense MLP keeps, and the result before it is weighted. Indices are left out: some 100 bytes
    a token. DeepSeek's router takes the stream in fp32.
    """
    shape = setup.shape
    widths = 7 if _traits(shape).activation == "clamped_swiglu" else 4
    routed = element * moe.experts_per_token * (2 * shape.hidden_size + widths * moe.ffn_hidden_size)
    router = 4.0 * moe.num_experts + (4 * shape.hidden_size if shape.latent and element == 2 else 0)
    shared = _mlp(shape, moe.shared_ffn_hidden_size / setup.tp, element)
    return {"experts": routed, "router": router, "shared_experts": shared}


def _autocast(setup: TrainingSetup, has_experts: bool) -> dict[str, float]:
    """Terms of layers with fp32 parameters under torch.autocast. The residual stream and the norms are fp32; every
    matmul casts its own input (autocast caches casts of parameters, not of activations), so query, key and value keep
    three copies and gate and up two."""
    shape, tp = setup.shape, setup.tp
    traits, h, f = _traits(shape), shape.hidden_size, shape.ffn_hidden_size / tp
    query, key_value = shape.query_width / tp, shape.key_value_width / tp
    if shape.family == "gpt2":
        return {
            "norms": 2 * (4 * h + 2 * h + 8),
            "attention": 2 * (query + 2 * key_value) + 2 * query,
            "core_attn": 4 * shape.num_attention_heads / tp,
            # On CUDA pow is on autocast's fp32 list (aten/src/ATen/autocast_mode.h), so its input and what follows
            # (tanh, 1 + tanh) are fp32; input/2 and the result cast for the next matmul are bf16.
            "mlp": (4 + 4 + 4 + 2 + 2) * f,
        }
    # Inputs of norms are fp32, and so is what an RMSNorm's scale multiplies; a LayerNorm keeps two statistics.
    norm = 8.0 * h + 4 if shape.norm == "rmsnorm" else 4.0 * h + 8
    inputs = 1 if shape.parallel_residual else 4 if traits.norm_placement == "both" else 2
    # Two norms of one input keep it once.
    second = 8 if shape.parallel_residual and not shape.shared_norm else 0
    terms = {"norms": inputs * norm + second}
    terms |= _latent(setup, shape.latent) if shape.latent else _attention(setup)
    # One product takes one cast; the router casts once.
    of_attention = 1 if shape.family in (*FUSED_PROJECTIONS, "falcon") else 3
    of_mlp = 1 if has_experts or not shape.gated_mlp or shape.family == "phi3" else 2
    terms["casts"] = 2.0 * h * (of_attention + of_mlp)
    if has_experts and shape.experts is not None:
        # Autocast does not know grouped products: experts stay in fp32 under it.
        return terms | _experts(setup, shape.experts, 4)
    return terms | {"mlp": _mlp(shape, f, 2)}

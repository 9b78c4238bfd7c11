"""Bytes per token that autograd saves for backward in one layer of a transformers model, by operator.

The terms were read from transformers' model files. With fused attention (torch's sdpa) only masks grow with the square
of the sequence; eager attention also saves its probabilities. Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1)
count 34·sbh for GELU, an MLP of width 4h and dropout masks; without the masks 32·sbh remain. A test compares the
formulas with the tensors that ``torch.autograd.graph.saved_tensors_hooks`` sees in real layers.
"""

from __future__ import annotations

from kit.cost.memory.states import quantised
from kit.cost.model.flops import STATE_CHUNK
from kit.cost.model.lora import dora_sizes
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.specs.job import MLP_LAYERS, LoraSpec
from kit.specs.model import Approximation, LatentAttention, ModelSpec
from kit.units import GIB

LOSS_BYTES = 12.0
"""Bytes per logit in the backward of torch's fp32 cross entropy: log-probabilities, their gradient, the logits'
gradient."""


def loss_bytes(workload: Workload) -> float:
    """Peak bytes of head and loss for one micro batch. A softcap on the logits saves its tanh.

    Chunked loss (kit/engines/kernels/chunked_loss.py): the logits of a chunk in the compute dtype and in fp32, the
    softcap's derivative, the gradient of the head's input for all tokens, the head's fp32 gradient, and the 16-bit
    result of the GEMM that is added to it.
    """
    if workload.chunked_loss:
        model, trained = workload.model, workload.job.lora is None
        copies = 4 + (workload.element if workload.element < 4 else 0) + (4 if model.logit_softcap is not None else 0)
        of_weight = 4 + (workload.element if workload.element < 4 else 0) if trained else 0
        of_input = (4 if workload.autocast else workload.element) * model.hidden_size * workload.tokens
        return (
            copies * model.vocab_size * workload.chunk_tokens
            + of_weight * model.vocab_size * model.hidden_size
            + of_input
        )
    capped = workload.element if workload.model.logit_softcap is not None else 0
    return (LOSS_BYTES + capped) * workload.model.vocab_size * workload.tokens


def layer_bytes(workload: Workload, has_experts: bool) -> float:
    """Bytes that one layer saves for backward per micro batch, without recompute."""
    return sum(layer_terms(workload, has_experts).values()) * workload.tokens


def layer_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Bytes per token that one layer saves for backward, by operator, without recompute."""
    model, lora = workload.model, workload.job.lora
    if lora is not None:
        # The frozen weights are in 16 bits, so the residual stream is too, autocast or not.
        terms = _with_frozen_weights(workload, lora, has_experts)
    else:
        terms = _autocast(workload, has_experts) if workload.autocast else _one_dtype(workload, has_experts)
        if workload.layout.compile_layers and _partition_is_known(model, has_experts):
            terms = _compiled(workload, terms)
    if (
        model.sliding_window is not None
        and model.sliding_window <= workload.job.seq_length
        and model.traits.fused_attention
    ):
        # transformers makes a mask if the sequence is at least as long as the window (masking_utils.py,
        # _ignore_causal_mask_sdpa). With a mask it repeats keys and values for all heads (sdpa_attention.py,
        # use_gqa_in_sdpa), and torch converts the boolean mask to a bias in every layer (transformers/attention.cpp,
        # convert_boolean_attn_mask). A single key head is repeated by a view, but autocast's cast of the rotated fp32
        # key copies it.
        copies = 2 if model.num_key_value_heads > 1 else int(workload.autocast)
        repeated = copies * (model.num_attention_heads - model.num_key_value_heads) * model.head_dim
        share = 1 - 1 / model.full_attention_every if model.full_attention_every else 1.0
        terms["window"] = share * workload.element * (repeated / workload.layout.tp + workload.job.seq_length)
    if workload.layout.tiled_mlp:
        terms["mlp"] = 0.0  # what a tile saves is counted as workspace
        if "casts" in terms:
            # A tile keeps its fp32 input and makes the casts of its own.
            terms["casts"] += 4.0 * model.hidden_size - 2.0 * model.hidden_size * _casts_of_mlp(model, has_experts)
    if workload.layout.cp > 1 and workload.layout.cp_comm_type == "a2a":
        # Attention's result is saved before and after the all-to-all. Every rank has a key head.
        own = 2 * model.key_value_width * max(0, workload.layout.cp / model.num_key_value_heads - 1)
        terms["attention"] += workload.element * (model.value_width + own)
    if model.approximate is not None:
        terms = _of_mean_layer(workload, model.approximate, terms)
    if model.traits.positions == "relative":
        # T5's learned position bias is the same for all sequences. Each decoder layer masks its own copy
        # (sdpa_attention.py, create_position_bias_mask); encoder layers share one tensor.
        share = (model.num_layers if model.is_encoder_decoder else 0) / workload.num_layers
        a_position = workload.element * model.num_attention_heads + 1
        terms["bias"] = share * a_position * workload.job.seq_length / workload.sequences
    return terms


def _of_mean_layer(workload: Workload, known: Approximation, terms: dict[str, float]) -> dict[str, float]:
    """Terms of the mean layer: each term times the share of layers that have it. A recurrent layer saves the inputs and
    outputs of its projections, as much again for convolution, gate and norm, and the fp32 state after each chunk
    (mamba-ssm and fla; transformers' own torch loops save more)."""
    model, layers = workload.model, workload.model.num_layers
    dense = model.first_dense_layers if model.num_experts else layers
    share = dict.fromkeys(("attention", "core_attn", "qk_norm", "latent"), known.attention_layers / layers)
    share["window"] = known.windowed_layers / layers
    share["mlp"] = min(1.0, known.mlp_layers / max(dense, 1))
    terms = {name: size * share.get(name, 1.0) for name, size in terms.items()}
    if known.recurrent_layers:
        projected = 2 * workload.element * known.recurrent / model.hidden_size
        terms["states"] = (projected + 4 * known.recurrent_layers * known.state / STATE_CHUNK) / layers
    return terms


def fp8_cast_workspace(workload: Workload) -> float:
    """Bytes of temporaries while torchao casts the largest operand of a GEMM (torchao/float8, 0.18): two 8-bit copies,
    one per memory layout. Without torch.compile also its fp32 scaled and clamped copies."""
    model = workload.model
    widest = max(model.hidden_size, model.ffn_hidden_size, model.value_width)
    element = 2.0 if workload.layout.compile_layers else 9.0
    return element * widest * max(workload.tokens, model.hidden_size)


def cross_attention(workload: Workload) -> float:
    """Bytes that the cross-attention of one decoder layer saves: as much as self-attention, with its norm. Source and
    target are assumed to have the same length."""
    terms = layer_terms(workload, False)
    own = sum(size for name, size in terms.items() if name not in ("norms", "mlp", "window", "bias"))
    return (own + terms["norms"] / 2) * workload.tokens


def layer_input(workload: Workload) -> float:
    """Bytes of a layer's input for one micro batch. Full recompute saves only this.

    Under autocast the residual stream stays fp32: embeddings are not cast.
    """
    fp32 = workload.autocast and workload.job.lora is None
    return (4 if fp32 else workload.element) * workload.model.hidden_size * workload.tokens


def saved_by_policy(workload: Workload) -> float:
    """Bytes that one dense layer saves for one micro batch under selective recompute
    (kit/engines/kernels/selective_recompute.py): its input, every second GEMM, attention's result and
    statistics."""
    of_products = sum(width for width, _ in workload.products[::2])
    model, tp = workload.model, workload.layout.tp
    attention = workload.element * model.value_width / tp + 4 * model.num_attention_heads / tp
    return layer_input(workload) + (workload.element * of_products + attention) * workload.tokens


def after_layers(workload: Workload) -> float:
    """Bytes that the final norm saves for one micro batch; its output is the head's input."""
    h, element = workload.model.hidden_size, workload.element
    if workload.job.lora is not None:
        return _norm_without_scale(workload.model, h, element) * workload.tokens
    if workload.autocast:
        return (_inside_norm(workload.model, h, 4) + 4 * h + 2 * h) * workload.tokens
    return (_inside_norm(workload.model, h, element) + element * h) * workload.tokens


def _inside_norm(model: ModelSpec, width: float, element: int) -> float:
    """Bytes per token that a norm saves, without its output.

    LayerNorm saves its input and two statistics. RMSNorm computes in fp32: it saves its fp32 input and the normalised
    tensor before the scale. The latter is in the model's dtype (modeling_llama.py) or in fp32 (modeling_gemma.py scales
    by 1 + weight; modeling_olmo2.py and modeling_gpt_oss.py scale before the cast).
    """
    if model.norm == "layernorm":
        return element * width + 2 * element
    traits = model.traits
    scaled = 4 if traits.norm_scaled_in_fp32 else element
    # T5 multiplies the 16-bit input by the inverse root, not the fp32 copy (modeling_t5.py), and so saves both.
    uncast = element if traits.norm_scales_input and element < 4 else 0
    return (4 + scaled + uncast) * width + 4


def _norms(workload: Workload, element: int) -> float:
    """Bytes per token that the norms of a layer save, and their outputs (or the residual stream), which the linear
    layers save as inputs."""
    model, h = workload.model, workload.model.hidden_size
    traits = model.traits
    inside = _inside_norm(model, h, element)
    if model.parallel_residual:
        # Both norms save the same input; or attention and MLP share one norm.
        return inside + element * h * (1 if model.shared_norm else 2) + (0 if model.shared_norm else 2 * element)
    return inside * (4 if traits.norm_placement == "both" else 2) + 2 * element * h


def _one_dtype(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Terms without autocast, where all activations have ``element`` bytes: DeepSpeed's 16-bit models, FSDP2, fp32."""
    model, element = workload.model, workload.element
    terms = {"norms": _norms(workload, element)}
    terms |= _latent(workload, model.latent) if model.latent else _attention(workload)
    if has_experts:
        return terms | _experts(workload, element)
    return terms | {"mlp": _mlp(model, model.ffn_hidden_size / workload.layout.tp, element)}


def _attention(workload: Workload) -> dict[str, float]:
    """Bytes per token of query and key (after RoPE), value and output, and of the attention kernel."""
    model, element, tp = workload.model, workload.element, workload.layout.tp
    query, key_value = model.query_width / tp, model.key_value_width / tp
    heads = model.num_attention_heads / tp
    traits = model.traits
    saved = element * (2 * query + 2 * key_value)
    if traits.fused_qkv and traits.positions == "rope":
        # Views keep the whole output of the fused QKV GEMM alive; joining the heads copies attention's output.
        saved += element * (2 * query + key_value)
    terms = {"attention": saved, "core_attn": 4 * heads}
    if traits.broadcasts_keys:
        return terms | _falcon(workload, query, key_value, heads)
    if not traits.fused_attention:
        # Eager attention saves fp32 probabilities, their 16-bit copy, the softcap's tanh, and keys and values repeated
        # for all heads. With sinks the softmax is in the model's dtype (without autocast), with one more column and the
        # row's maximum.
        capped = element if model.attention_softcap is not None else 0
        softmax = element if traits.attention_sinks and not workload.autocast else 4
        copy = element if element != softmax else 0
        terms["core_attn"] = (softmax + copy + capped) * heads * workload.job.seq_length
        terms["core_attn"] += (softmax + 8) * heads if traits.attention_sinks else 0
        terms["attention"] += element * 2 * (query - key_value)
    if traits.qk_norm == "head":
        # Before the scale, Llama's RMSNorm saves the normalised tensor in the model's dtype, Gemma's in fp32.
        scaled = 4 if traits.zero_centred_norm else element
        terms["qk_norm"] = (4 + scaled) * (query + key_value) + 4 * (heads + model.num_key_value_heads / tp)
    elif traits.qk_norm == "width":
        terms["qk_norm"] = 8 * (query + key_value) + 8
    return terms


def _falcon(workload: Workload, query: float, key_value: float, heads: float) -> dict[str, float]:
    """Terms of modeling_falcon.py. With one key head, sdpa falls back to torch's math kernel, which saves fp32
    probabilities and fp32 copies of query, key and value. The newer decoder layout repeats keys and values for all
    heads and passes a mask."""
    if workload.model.num_key_value_heads == 1:
        copies = 4 * (query + 2 * key_value) + workload.element * query
        return {"attention": copies, "core_attn": 4 * heads * workload.job.seq_length}
    return {"attention": workload.element * 4 * query, "window": float(workload.element * workload.job.seq_length)}


def _latent(workload: Workload, latent: LatentAttention) -> dict[str, float]:
    """Terms of latent attention (modeling_deepseek_v2.py): compressed states and their norms, concatenated heads. The
    value is a view, which keeps the whole output of the up-projection alive."""
    model, element, tp = workload.model, workload.element, workload.layout.tp
    heads = model.num_attention_heads / tp
    ranks = latent.kv_lora_rank + (latent.q_lora_rank or 0)
    joined = 2 * heads * latent.query_head_dim
    up = heads * (latent.nope_head_dim + latent.value_head_dim)
    return {
        "latent": (4 + 2 * element) * ranks + 8,
        "attention": element * (joined + up + heads * latent.value_head_dim),
        "core_attn": 4 * heads,
    }


def _mlp(model: ModelSpec, width: float, element: int) -> float:
    """Bytes per token of an MLP: gate, activated gate, up and their product; without a gate, input and output of the
    activation."""
    if model.gated_mlp:
        # T5's gate uses gelu_new, which saves three more tensors.
        return (7 if model.traits.eager_gelu else 4) * element * width
    if model.traits.eager_gelu and model.traits.activation != "relu":
        return 5 * element * width  # gelu_new is seven operators, which save its input and four results
    # ReLU saves only its output.
    return (1 if model.traits.activation == "relu" else 2) * element * width


def _experts(workload: Workload, element: int) -> dict[str, float]:
    """Bytes per token of routed experts, router and shared experts (transformers, integrations/moe.py,
    grouped_mm_experts_forward).

    Each expert of a token saves the token's copy, the tensors of a dense MLP, and its output before the router's
    weight. Indices (some 100 bytes per token) are not counted. DeepSeek's router casts its input to fp32.
    """
    model = workload.model
    widths = 7 if model.traits.activation == "clamped_swiglu" else 4
    routed = element * workload.routed_per_token * (2 * model.hidden_size + widths * model.moe_ffn_hidden_size)
    router = 4.0 * model.num_experts + (4 * model.hidden_size if model.latent and element == 2 else 0)
    shared = _mlp(model, model.shared_ffn_hidden_size / workload.layout.tp, element)
    if model.traits.shared_expert_gate:
        shared += element * model.hidden_size  # the output that the gate multiplies
    return {"experts": routed, "router": router, "shared_experts": shared}


def _autocast(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Terms of a layer with fp32 parameters under torch.autocast. Residual stream and norms are fp32. Every GEMM casts
    its own input, because autocast caches casts of parameters only: query, key and value save three copies of their
    input, gate and up two."""
    model, tp = workload.model, workload.layout.tp
    traits, h, f = model.traits, model.hidden_size, model.ffn_hidden_size / tp
    query, key_value = model.query_width / tp, model.key_value_width / tp
    if traits.conv1d:
        return {
            "norms": 2 * (4 * h + 2 * h + 8),
            "attention": 2 * (query + 2 * key_value) + 2 * query,
            "core_attn": 4 * model.num_attention_heads / tp,
            # autocast runs pow in fp32 on CUDA (aten/src/ATen/autocast_mode.h): pow's input, tanh and 1 + tanh are
            # fp32. input/2 and the cast of the result for the next GEMM are bf16.
            "mlp": (4 + 4 + 4 + 2 + 2) * f,
        }
    # Norms save fp32 inputs. RMSNorm also saves the fp32 tensor before the scale, LayerNorm two statistics.
    norm = 8.0 * h + 4 if model.norm == "rmsnorm" else 4.0 * h + 8
    inputs = 1 if model.parallel_residual else 4 if traits.norm_placement == "both" else 2
    # Two norms of the same input save it once.
    second = 8 if model.parallel_residual and not model.shared_norm else 0
    terms = {"norms": inputs * norm + second}
    terms |= _latent(workload, model.latent) if model.latent else _attention(workload)
    # One cast per GEMM; the router casts once.
    of_attention = 1 if traits.fused_qkv else 3
    terms["casts"] = 2.0 * h * (of_attention + _casts_of_mlp(model, has_experts))
    if has_experts:
        if model.num_shared_experts:
            terms["casts"] += 2.0 * h * ((2 if model.gated_mlp else 1) + int(traits.shared_expert_gate))
        experts = _experts(workload, 2)
        if model.latent:
            experts["router"] -= 4 * h  # its input is fp32 already
        return terms | experts
    return terms | {"mlp": _mlp(model, f, 2)}


def _partition_is_known(model: ModelSpec, has_experts: bool) -> bool:
    """Whether ``_compiled`` has the terms. Other layers are predicted as if they were not compiled: experts, whose
    partition on a CPU is not a GPU's; Falcon's, which save as much; eager attention, which saves down to half."""
    traits = model.traits
    usual = traits.fused_attention and not traits.broadcasts_keys and model.latent is None
    return usual and not has_experts and not model.is_encoder_decoder


def _compiled(workload: Workload, terms: dict[str, float]) -> dict[str, float]:
    """Terms of a dense layer under torch.compile. Its min-cut partitioner (torch/_functorch/partitioners.py) keeps the
    layer's input, inputs and outputs of GEMMs and of the attention kernel, and statistics of norms; element-wise
    operators run again in backward. A GEMM's input in fp8 is such an operator's result.
    """
    model, element, tp = workload.model, workload.element, workload.layout.tp
    traits, one_sum, fp8 = model.traits, model.parallel_residual, workload.job.precision == "fp8"
    query, key_value = model.query_width / tp, model.key_value_width / tp
    residual = 0.0 if traits.norm_placement == "output" else layer_input(workload) / workload.tokens
    inputs = 1 if one_sum and model.shared_norm else 2  # of attention and MLP
    outputs = 0 if one_sum else 1 if traits.norm_placement == "input" else 2  # that a norm or the second sum needs
    widths = (0 if fp8 else inputs) + outputs
    norms = 1 if one_sum else 4 if traits.norm_placement == "both" else 2
    statistics = 4 if model.norm == "rmsnorm" else 2 * (4 if workload.autocast else element)
    of_mlp = 3 if model.gated_mlp else 1 if traits.activation == "relu" else 2
    terms = {name: size for name, size in terms.items() if name != "casts"}
    terms["norms"] = residual + element * model.hidden_size * widths + statistics * norms
    terms["mlp"] = element * model.ffn_hidden_size / tp * (of_mlp - fp8)
    if traits.fused_qkv and traits.positions == "rope":
        terms["attention"] -= element * query
    if "qk_norm" in terms:
        heads = (model.num_attention_heads + model.num_key_value_heads) / tp if traits.qk_norm == "head" else 2
        terms["qk_norm"] = element * (query + key_value) + 4 * heads
    return terms


def _casts_of_mlp(model: ModelSpec, has_experts: bool) -> int:
    return 1 if has_experts or not model.gated_mlp or model.traits.fused_gate_up else 2


def _norm_without_scale(model: ModelSpec, width: float, element: int) -> float:
    """Bytes per token that a norm with a frozen scale saves: its input (in fp32 for RMSNorm) and statistics."""
    return element * width + 2 * element if model.norm == "layernorm" else 4.0 * width + 4


def _with_frozen_weights(workload: Workload, lora: LoraSpec, has_experts: bool) -> dict[str, float]:
    """Terms of a layer with frozen weights and LoRA adapters.

    An operator saves its input for the gradient of its weight, and a frozen weight has no gradient. So norms do not
    save the tensor before the scale, and a linear layer saves its input only for its adapter (peft,
    tuners/lora/layer.py, Linear.forward). Under autocast the adapters are fp32 and each saves its own cast of the
    input; without autocast they are 16-bit and save the shared input.
    """
    model, element, traits, terms = (
        workload.model,
        workload.element,
        workload.model.traits,
        _one_dtype(workload, has_experts),
    )
    h, f, query = model.hidden_size, model.ffn_hidden_size / workload.layout.tp, model.query_width / workload.layout.tp
    norms = 1 if model.parallel_residual and model.shared_norm else 4 if traits.norm_placement == "both" else 2
    terms["norms"] = norms * _norm_without_scale(model, h, element)
    if traits.qk_norm == "head" and "qk_norm" in terms:
        terms["qk_norm"] *= 4 / (8 if traits.zero_centred_norm else 4 + element)
    copies = workload.autocast
    layers = _adapted_layers(model, lora, has_experts)
    of_hidden = sum(len(layers & each) if copies else min(1, len(layers & each)) for each in _ONE_INPUT)
    terms["adapters"] = element * (h * of_hidden + (query if copies and "o_proj" in layers else 0))
    # terms["mlp"] already has the input of the down-projection.
    if "down_proj" not in layers and not has_experts:
        terms["mlp"] -= element * f if model.gated_mlp or traits.activation != "relu" else 0
    if lora.dropout:
        terms |= _dropped_out(workload, terms, layers)
    terms["adapters"] += element * sum(map(lora.rank_of, layers))
    if (base := quantised(lora)) is not None and base.keeps_inputs:
        # Adapters save these inputs too, but for those that have a copy of their own.
        own, (hidden, last, _) = copies or lora.dropout > 0, _linear_inputs(model, has_experts)
        again = last if not has_experts and (own or "down_proj" not in layers) else 0
        terms["adapters"] += element * (h * max(0, hidden - (0 if own else of_hidden)) + again)
    # The gradient of DoRA's magnitudes needs the outputs of the frozen layer and of the adapter.
    terms["adapters"] += 2 * element * dora_sizes(model, lora)[1]
    return terms


def _linear_inputs(model: ModelSpec, has_experts: bool) -> tuple[int, int, int]:
    """Inputs of a layer's linear layers outside of routed experts: (how many of the hidden size, width of the
    down-projection's, width of all others)."""
    compressed = model.latent.kv_lora_rank + (model.latent.q_lora_rank or 0) if model.latent else 0
    down = model.shared_ffn_hidden_size if has_experts else model.ffn_hidden_size
    one = not down or (model.parallel_residual and model.shared_norm)
    return 1 if one else 2, down, model.value_width + compressed


def kept_inputs(workload: Workload, has_experts: bool) -> float:
    """Bytes of the inputs that one layer's quantised linear layers keep themselves, so that full recompute does not
    free them: torch's checkpoint without reentry sees saved tensors alone (torch/utils/checkpoint.py)."""
    base, model = quantised(workload.job.lora), workload.model
    if base is None or not base.keeps_inputs:
        return 0.0
    hidden, *widths = _linear_inputs(model, has_experts)
    return workload.element * (hidden * model.hidden_size + sum(widths)) * workload.tokens


_ONE_INPUT = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Layers that share their input, of the hidden size."""


def _adapted_layers(model: ModelSpec, lora: LoraSpec, has_experts: bool) -> frozenset[str]:
    """Layers with an adapter, by Llama's names; a fused layer counts as its first tensor."""
    traits = model.traits
    missing = {"k_proj", "v_proj"} if traits.fused_qkv else set()
    missing |= {"gate_proj"} if traits.fused_gate_up or not model.gated_mlp else set()
    return lora.layers - missing - (MLP_LAYERS if has_experts else set())


def _dropped_out(workload: Workload, terms: dict[str, float], layers: frozenset[str]) -> dict[str, float]:
    """Terms of adapters and MLP with LoRA dropout. Each adapter saves the mask of its input, one byte per element
    (torch, native_dropout), and the output of the dropout. Under autocast this output replaces the adapter's copy."""
    model, element = workload.model, workload.element
    h, f, query = model.hidden_size, model.ffn_hidden_size / workload.layout.tp, model.query_width / workload.layout.tp
    inputs = float(h) * sum(len(layers & each) for each in _ONE_INPUT)
    inputs += (query if "o_proj" in layers else 0) + (f if "down_proj" in layers else 0)
    if workload.autocast:
        return {"adapters": terms["adapters"] + inputs}
    # The output of the dropout replaces the input of the down-projection.
    product = {"mlp": terms["mlp"] - element * f} if "down_proj" in layers and model.gated_mlp else {}
    return {"adapters": (element + 1) * inputs} | product


# ---------------------------------------------------------------- generation, by TRL's GRPOTrainer


def generation_bytes(workload: Workload) -> float:
    """Bytes that generation needs on a GPU, before the step's forward: the share of a vLLM that sleeps otherwise.
    Transformers' own needs keys and values of the rank's completions of the whole step, their logits, and at ZeRO-3 the
    gathered weights (ds3_gather_for_generation)."""
    if workload.trl is None or not workload.trl.generates or workload.vllm_share:
        return workload.vllm_sleeps * workload.vllm_share * workload.cluster.gpu.memory_gib * GIB
    rows, model, layout = workload.completions, workload.model, workload.layout
    whole = layout.engine == "deepspeed" and layout.zero_stage == 3
    gathered = workload.element * count(model).total if whole else 0.0
    cached = workload.cached_bytes_per_token * rows * workload.job.seq_length
    return gathered + cached + 4.0 * rows * model.vocab_size

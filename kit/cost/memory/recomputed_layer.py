"""Bytes of a dense Hugging Face layer while full recompute runs its forward again and then its backward.

The layer's tensors are freed from its end to its beginning, so three moments may be the fullest: the MLP's backward,
that of the norm before it, and that of attention. The terms were read from transformers' modules, from
kit/engines/kernels and from torch's CUDA kernels; the probe counts the same (tests/diagnose). With long sequences these
tensors are most of a rank's memory.
"""

from __future__ import annotations

from kit.cost.memory.activations_huggingface import layer_input, layer_terms
from kit.cost.workload import Workload


def recomputed_layer_bytes(workload: Workload) -> float:
    """Peak bytes of one layer's saved tensors and gradients, for one micro batch, without its input."""
    terms = layer_terms(workload, False)
    attention = sum(terms.values()) - terms["mlp"]
    if not workload.model.parallel_residual and workload.model.traits.norm_placement == "input":
        attention -= terms["norms"] / 2
    residual = layer_input(workload) / workload.tokens  # the gradient that goes around the layer
    moments = (
        sum(terms.values()) + _mlp(workload),
        sum(terms.values()) - terms["mlp"] + _norm(workload),
        attention + attention_backward(workload),
    )
    return (residual + max(moments)) * workload.tokens


def _mlp(workload: Workload) -> float:
    """Bytes per token of the MLP's gradients. A gated MLP has three of its width when it has freed its product."""
    model, width = workload.model, workload.element * workload.model.ffn_hidden_size / workload.layout.tp
    frees = model.gated_mlp and not model.traits.eager_gelu and model.traits.norm_placement == "input"
    return 2 * width if frees else 3 * width + workload.element * model.hidden_size


def _norm(workload: Workload) -> float:
    """Bytes per token that the backward of a norm has beside the layer's saved tensors. RMSNorm is nine operators in
    fp32: five temporaries, less the output and the tensor before the scale, which are freed."""
    model, h = workload.model, workload.model.hidden_size
    if model.norm == "layernorm":
        return workload.element * h
    return 20.0 * h - (2 * workload.element * h if model.traits.norm_placement == "input" else 0)


def attention_backward(workload: Workload) -> float:
    """Bytes per token of gradients and buffers in attention's backward, beside what the layer saved.

    FlashAttention-2 sums the query's gradient in fp32, and writes gradients of keys and values for every query head
    (aten/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd). The ring's first round is its fullest: fp32 sums
    of all gradients, the next rank's keys and values on their way, and its own repeated for all query heads. Ulysses
    has other heads and more tokens, of which a rank has as many bytes.
    """
    model, layout, element = workload.model, workload.layout, workload.element
    heads = model.num_attention_heads / layout.tp
    query, value = model.query_width / layout.tp, model.value_width / layout.tp
    own = 2 * model.key_value_width / layout.tp if model.latent is None else query + value
    repeated = query + value if model.latent is not None else 2 * query
    total = element * value  # the gradient of its result
    if not model.traits.fused_attention:
        return total + layer_terms(workload, False)["core_attn"] + element * (query + repeated)
    total += element * (query + repeated)
    in_fp32 = 4 * (query + heads) if workload.cluster.gpu.device == "cuda" and element == 2 else 0
    if layout.cp == 1 or layout.cp_comm_type != "p2p":
        return total + max(in_fp32, element * own if own < repeated else 0)
    return total + max(in_fp32, 4 * own / 2) + 4 * (query + own) + element * (own + repeated)

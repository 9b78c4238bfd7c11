"""Bytes that element-wise operators move through GPU memory: what makes unfused layers slower than their matmuls.

Counted operator by operator as read plus written, for forward; backward moves about twice as much (it reads what was
saved and the incoming gradient, and writes the outgoing one).
"""

from __future__ import annotations

from kit.cost.planned import uses_autocast
from kit.specs.job import Precision
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

_FORWARD_KERNELS = {"huggingface-sdpa": 50, "torch-native": 40}
_ROUTING_KERNELS = 20
_EXPERT_KERNELS = 8


def layer_forward_kernels(model: ModelSpec, layout: Layout) -> int:
    """Kernels that one layer launches in forward, counted in the layers' code; backward launches about twice as many.

    transformers computes all experts in one grouped product, megatron-core's SequentialMLP one expert after the other.
    """
    kernels = _FORWARD_KERNELS[layout.implementation]
    if not model.num_experts:
        return kernels
    one_by_one = model.num_experts // layout.ep if layout.implementation == "torch-native" else 1
    return kernels + _ROUTING_KERNELS + _EXPERT_KERNELS * one_by_one


def layer_forward_bytes_per_token(model: ModelSpec, precision: Precision, layout: Layout) -> float:
    """Forward of one layer, one rank, per token of the rank's sequence."""
    element = 2 if precision == "bf16" else 4
    # Tokens are sorted by expert and back: four copies of them, read and written, for each expert of a token.
    copies = 8 * element * model.experts_per_token * model.hidden_size / layout.tp
    return copies + _dense_bytes_per_token(model, precision, layout, element)


def _dense_bytes_per_token(model: ModelSpec, precision: Precision, layout: Layout, element: int) -> float:
    h, f = model.hidden_size, model.mlp_width * max(1, model.experts_per_token) / layout.tp
    query_key = (model.num_attention_heads + model.num_key_value_heads) / layout.tp * model.head_dim
    if layout.implementation == "torch-native":
        outer = h / (layout.tp if layout.sp else 1)
        # Per norm: read, write. Per residual: read two, write one.
        norms_and_residuals = (2 * 2 + 2 * 3) * element * outer
        # Cast-free rotation: two products, one rotated copy, one sum. SwiGLU: silu, up + offset, product.
        return norms_and_residuals + 10 * element * query_key + 7 * element * f
    if uses_autocast(precision, layout):
        # fp32 norms (28 each) and residuals (10 each), five casts of 6; rotation in fp32 with casts.
        return (2 * 28 + 2 * 10 + 5 * 6) * h + 34 * query_key + 10 * f
    # RMSNorm in fp32 with casts: 36 each in bf16; residuals: read two, write one.
    norm = 36 if element == 2 else 40
    return (2 * norm + 2 * 3 * element) * h + 10 * element * query_key + 5 * element * f


def loss_bytes_per_token(model: ModelSpec, layout: Layout) -> float:
    """Forward and backward of the loss: cast, log-softmax, its gradient and the cast back (36 bytes an entry)."""
    return 36.0 * model.vocab_size / layout.tp


def micro_batch_bytes_per_parameter(precision: Precision, layout: Layout) -> float:
    """Per parameter of the rank and micro batch: casts of weights under autocast, accumulation into fp32 gradients."""
    if layout.engine == "torch":
        return 6.0 if uses_autocast(precision, layout) else 0.0
    if layout.engine == "megatron":
        return 10.0 if precision == "bf16" else 12.0
    return 10.0 if layout.gradient_accumulation_steps > 1 else 4.0


def optimizer_bytes_per_parameter(precision: Precision) -> float:
    """AdamW: four fp32 values read and three written (28); norm and clipping (12); the cast to bf16."""
    return 40.0 + (2.0 if precision == "bf16" else 0.0)

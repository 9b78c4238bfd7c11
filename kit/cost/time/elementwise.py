"""Bytes that element-wise operators move through GPU memory, and the kernels that a layer launches.

Counted operator by operator as read plus written, for forward; backward moves about twice as much (it reads what was
saved and the incoming gradient, and writes the outgoing one). Elements of activations have 2 bytes, fp32 runs 4.
"""

from __future__ import annotations

from kit.cost.model.params import RankParameters
from kit.cost.setup import Code, Program, TrainingSetup
from kit.cost.time import fp8_casts

SCORE_PASSES = 4.5
"""Unfused attention: elements read and written a score beside the products: softmax two, dropout two and its mask."""
ATTENTION_BLOCK = 128
"""Queries and keys in a block of fused attention: blocks on the diagonal are computed in full (arXiv 2307.08691)."""
ATTENTION_RAMP = 512
"""Sequence length at which fused attention reaches half of its best rate (arXiv 2307.08691, figure 5, causal)."""

BACKWARD_LAUNCHES = 1.5
"""Kernels of backward for each of forward, by the time that autograd's C++ threads take to issue them."""

AFTER_SYNC = 0.3
"""Share of a layer's kernels that follow the host's wait for the routing: dispatch, experts and the way back."""

_KERNELS: dict[Code, float] = {"fused": 60, "compiled": 40, "eager": 50, "huggingface": 50, "local": 40}
"""Operators that a layer issues in forward: counted in the layers' code; Transformer Engine's modules count for more
than their kernels, they prepare arguments in Python."""
_FP8_KERNELS = 40
"""Scales and casts of four products' inputs and weights."""
_ROUTING_KERNELS = 150
_EXPERT_KERNELS: dict[Code, float] = {"fused": 20, "compiled": 8, "eager": 8, "huggingface": 1, "local": 12}
"""For each expert of a rank. transformers computes all experts in one grouped product, megatron-core's SequentialMLP
one after the other, Transformer Engine quantises and multiplies each."""


def layer_kernels(setup: TrainingSetup, has_experts: bool) -> float:
    """Operators issued one by one; captured graphs issue none."""
    if setup.program.graphs == "full":
        return 0.0
    low = setup.program.precision in ("fp8", "mxfp8", "nvfp4")
    kernels = _KERNELS[setup.program.code] + (_FP8_KERNELS if low else 0.0)
    if setup.program.linear_layers_only and setup.program.code != "compiled":
        kernels += fp8_casts.EAGER_KERNELS - fp8_casts.COMPILED_KERNELS
    if setup.program.graphs == "partial":
        kernels = 0.0
    if has_experts and setup.shape.experts is not None:
        local = setup.shape.experts.num_experts / setup.ep
        kernels += _ROUTING_KERNELS + _EXPERT_KERNELS[setup.program.code] * local * (1.5 if low else 1.0)
    return kernels


def layer_traffic_bytes(setup: TrainingSetup, has_experts: bool) -> float:
    """Forward of one layer on one rank, one micro batch."""
    shape, tp, tokens, outer = setup.shape, setup.tp, setup.tokens, setup.shard_tokens
    element = 4.0 if setup.program.precision == "fp32" else 2.0
    h = shape.hidden_size
    rotated = (shape.query_width + shape.key_value_width) / tp if shape.learned_positions == 0 else 0.0
    width = shape.ffn_hidden_size / tp
    copies = 0.0
    if has_experts and shape.experts is not None:
        moe = shape.experts
        width = (moe.experts_per_token * moe.ffn_hidden_size + moe.shared_ffn_hidden_size) / tp
        # Tokens are copied to their experts and back, each way read and written: permuted, sent, received, sorted.
        copies = 6 * element * moe.experts_per_token * h * tokens / tp
    norm, residual, rotation, activation = _operators(setup.program, shape.gated_mlp, element)
    if shape.hidden_dropout:
        residual += 1.0
    total = 2 * (norm + residual) * h * outer + tokens * (rotation * rotated + activation * width) + copies
    if setup.program.linear_layers_only:
        return total + fp8_casts.activation_bytes(setup, has_experts, setup.program.code == "compiled")
    return total + _quantised(setup, width, outer)


def _operators(program: Program, gated: bool, element: float) -> tuple[float, float, float, float]:
    """Bytes an element: (norm, residual, rotation of queries and keys, activation of the MLP)."""
    if program.code == "huggingface":
        # RMSNorm in fp32 with casts.
        return (36.0 if element == 2 else 40.0), 3 * element, 5 * element, 5 * element
    if program.code == "eager":
        return 2 * element, 3 * element, 10 * element, (5 if gated else 2) * element
    if program.code == "local":
        # Rotation: two products, one rotated copy, one sum. SwiGLU: silu, up + offset, product.
        return 2 * element, 3 * element, 5 * element * 2, 7 * element
    # Fused: each reads its inputs and writes its output once.
    return 2 * element, 3 * element, 2 * element, (3 if gated else 2) * element


def _quantised(setup: TrainingSetup, width: float, outer: float) -> float:
    """8- and 4-bit products: their inputs are read, and written in both orientations."""
    if setup.program.precision not in ("fp8", "mxfp8", "nvfp4"):
        return 0.0
    shape = setup.shape
    inputs = (2 * shape.hidden_size + shape.value_width / setup.tp + width) * setup.tokens
    scale = 2.0 if setup.program.precision == "fp8" else 0.0
    return (2.0 + 2.0 + scale) * inputs


def loss_traffic_bytes(setup: TrainingSetup) -> float:
    """A token's, forward and backward: cast, log-softmax, its gradient and the cast back."""
    entries = setup.shape.vocab_size / setup.tp
    if setup.chunked_loss and setup.kernels == "huggingface":
        return _chunked_loss_bytes(setup, entries)
    if setup.compiled_loss or setup.cross_entropy != "unfused":
        return 14.0 * entries
    return (20.0 if setup.kernels in ("transformer_engine", "megatron-local", "local") else 36.0) * entries


def _chunked_loss_bytes(setup: TrainingSetup, entries: float) -> float:
    """Counted in kit/engines/kernels/chunked_loss.py: eleven operators on fp32 logits, or compiled three readings in
    16 bits and one writing; and for every chunk the head's gradient, a product in 16 bits added to a sum in fp32."""
    of_head = 12.0 * setup.shape.hidden_size / setup.chunk_tokens if setup.lora is None else 0.0
    return ((8.0 if setup.compiled_loss or setup.liger_loss else 44.0) + of_head) * entries


def micro_batch_bytes(setup: TrainingSetup, held: RankParameters) -> float:
    """Bytes moved per micro batch for the rank's parameters, besides GEMMs: casts of weights, sums of gradients."""
    if setup.program.engine == "megatron":
        return 0.0 if setup.gradient_accumulation_fusion else setup.program.gradient_sum_bytes * held.total
    if setup.program.engine == "deepspeed":
        return (10.0 if setup.micro_batches > 1 else 4.0) * held.total
    cast = setup.weight_bytes == 4 and setup.sharding == "none" and setup.program.precision in ("bf16", "fp8")
    moved = 6.0 * held.total if cast else 0.0
    if setup.program.linear_layers_only:
        # Of fp32 weights autocast makes no 16-bit copy then; their gradients in 16 bits are still added to fp32.
        moved += fp8_casts.weight_bytes(setup, setup.program.code == "compiled") * held.dense_matrices
    return moved


def optimizer_bytes_per_parameter(precision: str, moments: float) -> float:
    """AdamW: weight and gradient read, weight written (12), ``moments`` bytes read and written (16); norm and clipping
    (12); the cast to 16 bits."""
    return 24.0 + 2 * moments + (0.0 if precision == "fp32" else 2.0)

"""Bytes that element-wise operators move through GPU memory, and the kernels that a layer launches.

Counted operator by operator as read plus written, for forward; backward moves about twice as much (it reads what was
saved and the incoming gradient, and writes the outgoing one). Elements of activations have 2 bytes, fp32 runs 4.
"""

from __future__ import annotations

from kit.cost.memory.states import MOMENTS
from kit.cost.model.params import RankParameters
from kit.cost.workload import Code, Workload

LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
MEGATRON_LAYERS = ("transformer_engine", "megatron-local", "local")

SCORE_PASSES = 4.5
"""Unfused attention: elements read and written a score beside the GEMMs: softmax two, dropout two and its mask."""
ATTENTION_BLOCK = 128
"""Queries and keys in a block of fused attention: blocks on the diagonal are computed in full (arXiv 2307.08691)."""
ATTENTION_RAMP = 512
"""Sequence length at which fused attention reaches half of its best rate (arXiv 2307.08691, figure 5, causal)."""

BACKWARD_LAUNCHES = 1.5
"""Kernels of backward for each of forward, by the time that autograd's C++ threads take to issue them."""

AFTER_SYNC = 0.3
"""Share of a layer's kernels that follow the host's wait for the routing: dispatch, experts and the way back."""

_KERNELS: dict[Code, float] = {"fused": 60, "compiled": 40, "eager": 50, "huggingface": 100, "local": 40}
"""Operators that a layer issues in forward: counted in the layers' code; Transformer Engine's modules count for more
than their kernels, they prepare arguments in Python. transformers' count with views and modules: a Llama layer takes a
host 0.79 ms forward and 1.12 ms backward where there is nothing to compute (measured on a CPU)."""
_FP8_KERNELS = 40
"""Scales and casts of four GEMMs' inputs and weights."""
_EAGER_CAST_KERNELS = 80.0
"""More where torchao's casts run operator by operator: two operands of a block's seven linear layers, with a scale."""
_COMPILED_CAST_BYTES = 6.0
"""An element of 16 bits: read twice, and written in 8 bits in the one or two orientations that its GEMMs want."""
_EAGER_CAST_BYTES = 33.0
"""abs 4, max 2, cast 6, scale 8, clamp 8, cast to 8 bits 5."""
_ROUTING_KERNELS = 150
_EXPERT_KERNELS: dict[Code, float] = {"fused": 20, "compiled": 8, "eager": 8, "huggingface": 1, "local": 12}
"""For each expert of a rank. transformers computes all experts in one grouped GEMM, megatron-core's SequentialMLP
one after the other, Transformer Engine quantises and multiplies each."""


def layer_kernels(workload: Workload, has_experts: bool) -> float:
    """Operators that the host issues one by one; captured graphs issue none."""
    how = workload.execution
    if how.graphs == "full":
        return 0.0
    low = how.precision in LOW_PRECISIONS
    kernels = 0.0
    if how.graphs == "none":
        kernels = _KERNELS[how.code] + (_FP8_KERNELS if low else 0.0)
        kernels += _EAGER_CAST_KERNELS if how.linear_layers_only and how.code != "compiled" else 0.0
    if has_experts:
        local = workload.model.num_experts / workload.layout.ep
        kernels += _ROUTING_KERNELS + _EXPERT_KERNELS[how.code] * local * (1.5 if low else 1.0)
    return kernels


def recompute_launches(workload: Workload) -> tuple[float, float]:
    """(forward, recompute) over the launches of a forward without it. torch's checkpoint wraps every saved tensor in
    hooks: a Llama layer of transformers takes the host 1.5 times as long forward and twice as long once more (measured
    on a CPU, as above)."""
    if workload.layout.recompute != "full":
        return 1.0, 0.0
    return (1.5, 2.0) if workload.execution.code == "huggingface" else (1.0, 1.0)


def layer_elementwise_bytes(workload: Workload, has_experts: bool) -> float:
    """Forward of one layer on one rank, one micro batch."""
    model, tp, tokens, outer = workload.model, workload.layout.tp, workload.tokens, workload.shard_tokens
    element = 4.0 if workload.execution.precision == "fp32" else 2.0
    h, width, copies = model.hidden_size, model.ffn_hidden_size / tp, 0.0
    rotated = 0.0 if model.learned_positions else (model.query_width + model.key_value_width) / tp
    if has_experts:
        width = (model.experts_per_token * model.moe_ffn_hidden_size + model.shared_ffn_hidden_size) / tp
        # Tokens are copied to their experts and back, each way read and written: permuted, sent, received, sorted.
        copies = 6 * element * model.experts_per_token * h * tokens / tp
    norm, residual, rotation, activation = _operators(workload.execution.code, model.gated_mlp, element)
    residual += 1.0 if workload.hidden_dropout else 0.0
    total = 2 * (norm + residual) * h * outer + tokens * (rotation * rotated + activation * width) + copies
    if workload.execution.linear_layers_only:
        return total + _torchao_activation_casts(workload, has_experts)
    return total + _quantised(workload, width)


def _operators(code: Code, gated: bool, element: float) -> tuple[float, float, float, float]:
    """Bytes an element: (norm, residual, rotation of queries and keys, activation of the MLP)."""
    if code == "huggingface":
        # RMSNorm in fp32 with casts.
        return (36.0 if element == 2 else 40.0), 3 * element, 5 * element, 5 * element
    if code == "eager":
        return 2 * element, 3 * element, 10 * element, (5 if gated else 2) * element
    if code == "local":
        # Rotation: two products, one rotated copy, one sum. SwiGLU: silu, up + offset, product.
        return 2 * element, 3 * element, 5 * element * 2, 7 * element
    # Fused: each reads its inputs and writes its output once.
    return 2 * element, 3 * element, 2 * element, (3 if gated else 2) * element


def _quantised(workload: Workload, width: float) -> float:
    """8- and 4-bit GEMMs: their inputs are read, and written in both orientations."""
    precision, model = workload.execution.precision, workload.model
    if precision not in LOW_PRECISIONS:
        return 0.0
    inputs = (2 * model.hidden_size + model.value_width / workload.layout.tp + width) * workload.tokens
    return (6.0 if precision == "fp8" else 4.0) * inputs


def _torchao_activation_casts(workload: Workload, has_experts: bool) -> float:
    """torchao's GEMMs in 8 bits (torchao/float8, 0.18): of one layer's forward and micro batch; backward casts as many
    gradients and inputs once more.

    Every operand is read for its largest value, and once more to be written in 8 bits. Compiled, a block casts what
    several layers read once; operator by operator each layer casts its own, through an absolute value, a copy in fp32,
    one scaled and one clamped.
    """
    model, h = workload.model, workload.model.hidden_size
    # Experts that tokens choose are no linear layers, and stay in 16 bits.
    width = model.shared_ffn_hidden_size if has_experts else model.ffn_hidden_size
    if workload.execution.code == "compiled":
        return _COMPILED_CAST_BYTES * (2 * h + model.value_width + width) * workload.tokens
    inputs = (5 if model.gated_mlp else 4) * h + model.value_width + width
    return _EAGER_CAST_BYTES * inputs * workload.tokens


def _torchao_weight_casts(workload: Workload) -> float:
    """A converted parameter's in a micro batch, forward and backward: fp32 where every rank holds it, bf16 gathered."""
    element = 4.0 if workload.layout.zero_stage == 0 else 2.0
    if workload.execution.code == "compiled":
        return 2 * (2 * element + 1)
    return 2 * (3 * element + _EAGER_CAST_BYTES - 6)


def loss_elementwise_bytes(workload: Workload) -> float:
    """A token's, forward and backward: cast, log-softmax, its gradient and the cast back."""
    entries = workload.model.vocab_size / workload.layout.tp
    if workload.layout.chunked_loss and workload.implementation == "huggingface":
        return _chunked_loss_bytes(workload, entries)
    if workload.compiled_loss or workload.cross_entropy != "unfused":
        return 14.0 * entries
    return (20.0 if workload.implementation in MEGATRON_LAYERS else 36.0) * entries


def _chunked_loss_bytes(workload: Workload, entries: float) -> float:
    """Counted in kit/engines/kernels/chunked_loss.py: eleven operators on fp32 logits, or compiled three readings in
    16 bits and one writing; and for every chunk the head's gradient, a GEMM in 16 bits added to a sum in fp32."""
    model, fused = workload.model, workload.compiled_loss or workload.layout.loss_kernel == "liger"
    of_head = 12.0 * model.hidden_size / workload.chunk_tokens if workload.job.lora is None else 0.0
    return ((8.0 if fused else 44.0) + of_head) * entries


_COPIED_OUT, _COPIED_IN = 4.0, 6.0
"""FSDP2: bytes a gathered weight that is copied out of the collective's buffer, and a gradient that is cast and copied
into one (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""


def micro_batch_bytes(workload: Workload, parameters: RankParameters) -> float:
    """Bytes moved per micro batch for the rank's parameters, besides GEMMs: casts of weights, sums of gradients."""
    layout, how = workload.layout, workload.execution
    if how.engine == "megatron":
        return 0.0 if workload.gradient_accumulation_fusion else how.gradient_sum_bytes * parameters.total
    if how.engine == "deepspeed":
        moved = _zero_gradient_bytes(layout.zero_stage, layout.gradient_accumulation_steps)
        return moved * workload.trained_share(parameters) * parameters.total
    cast = workload.weight_bytes == 4 and layout.zero_stage == 0 and how.precision in ("bf16", "fp8")
    moved = 6.0 * parameters.total if cast else 0.0
    if how.engine == "fsdp" and how.copies_gathered:
        moved += (_COPIED_OUT * (2 if layout.zero_stage == 3 else 1)) * parameters.total
        moved += _COPIED_IN * workload.trained_share(parameters) * parameters.total
    if how.linear_layers_only:
        # Of fp32 weights autocast makes no 16-bit copy then; their gradients in 16 bits are still added to fp32.
        moved += _torchao_weight_casts(workload) * parameters.dense_matrices
    return moved


def _zero_gradient_bytes(stage: int, micro_batches: int) -> float:
    """ZeRO's copies of a 16-bit gradient: into the bucket, into a flat tensor, divided, back (4 each), in every micro
    batch at stage 2 and in the last one below; added to the sum of micro batches (6). Stage 3's are beside its
    collectives."""
    if stage == 3:
        return 0.0
    return 16.0 * (1.0 if stage == 2 else 1.0 / micro_batches) + (6.0 if micro_batches > 1 and stage < 2 else 0.0)


_ZERO_STEP_BYTES = 36.0
"""More in a step of ZeRO: gradients flattened (4) and cast to fp32 (6), their norm in fp64 (18), tests for infinity and
NaN (8) (DeepSpeed, runtime/zero/stage3.py and stage_1_and_2.py: step)."""


def optimizer_bytes_per_parameter(workload: Workload) -> float:
    """AdamW: weight and gradient read, weight written (12), moments read and written; norm and clipping (12); the cast
    to 16 bits; DeepSpeed's own passes."""
    more = 0.0 if workload.execution.precision == "fp32" else 2.0
    more += _ZERO_STEP_BYTES if workload.execution.engine == "deepspeed" and workload.layout.zero_stage else 0.0
    return 24.0 + 2 * MOMENTS[workload.job.optimizer.name].rest + more

"""Memory traffic of element-wise operators, in bytes, and the number of kernels that a layer launches.

The bytes are those read plus those written in forward, summed over operators. Backward moves about twice as much: it
reads the saved tensors and the incoming gradient, and writes the outgoing gradient. Activations have 2 bytes per
element, in fp32 runs 4.
"""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.memory.states import QUANTISED, quantised
from kit.cost.model.lora import dora_sizes, linear_layers
from kit.cost.model.params import RankParameters, count
from kit.cost.workload import Code, Workload
from kit.specs.optimizers import OPTIMIZERS

LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
MEGATRON_LAYERS = ("transformer_engine", "megatron-local", "local")

SCORE_PASSES = 4.5
"""Unfused attention: elements read or written per score outside the GEMMs: softmax 2, dropout 2, its mask 0.5."""
ATTENTION_BLOCK = 128
"""Queries and keys per block of fused attention, which computes blocks on the diagonal in full (arXiv 2307.08691)."""
ATTENTION_RAMP = 512
"""Sequence length at which fused attention reaches half of its best rate (arXiv 2307.08691, figure 5, causal)."""

BACKWARD_LAUNCHES = 1.5
"""Launch time of backward over that of forward; autograd's C++ threads launch the backward kernels."""

AFTER_SYNC = 0.3
"""Share of a layer's kernels after the host has waited for the routing: dispatch, experts and combine."""

_KERNELS: dict[Code, float] = {"fused": 60, "compiled": 40, "eager": 50, "huggingface": 100, "local": 40}
"""Operators that the host launches for one layer in forward, counted in the layers' code. Transformer Engine's modules
count as more than their kernels, because they prepare arguments in Python. The figure of transformers includes views
and module calls: a Llama layer takes the host 0.79 ms forward and 1.12 ms backward with empty tensors (measured on a
CPU)."""
_FP8_KERNELS = 40
"""Kernels that scale and cast the inputs and weights of four GEMMs."""
_EAGER_CAST_KERNELS = 80.0
"""Additional kernels of torchao's casts without torch.compile: two operands and scales for seven linear layers."""
_COMPILED_CAST_BYTES = 6.0
"""Memory traffic of a compiled cast, per 16-bit element: two reads, and one or two 8-bit writes (one per layout)."""
_EAGER_CAST_BYTES = 33.0
"""Memory traffic of a cast without torch.compile, per 16-bit element: abs 4, max 2, cast to fp32 6, scale 8, clamp 8,
cast to 8 bits 5."""
_ROUTING_KERNELS = 150
_EXPERT_KERNELS: dict[Code, float] = {"fused": 20, "compiled": 8, "eager": 8, "huggingface": 1, "local": 12}
"""Operators per expert of a rank. transformers computes all experts in one grouped GEMM, megatron-core's SequentialMLP
one after the other; Transformer Engine quantises and multiplies each expert."""


class Branch(NamedTuple):
    """What an adapter's branch y + s·B(A(x)) moves beside its two GEMMs, bytes per token, and its operators."""

    inputs: float
    """Per input, in forward."""
    outputs: float
    """Per output, in forward."""
    inputs_back: float
    outputs_back: float
    kernels: float
    """Operators that the host launches in forward."""


_BRANCH = Branch(0.0, 10.0, 6.0, 4.0, 12)
"""A product s·B(A(x)) (4) and a sum (6); backward multiplies by s (4) and adds the gradient of x to that of the frozen
product (6) (peft/tuners/lora/layer.py; torchtune/modules/peft/lora.py; Megatron-Bridge, peft/lora_layers.py)."""
_CAST_BRANCH = Branch(12.0, 10.0, 18.0, 4.0, 17)
"""x is cast to the adapters' fp32 (6) and back for A's GEMM (6), and so is its gradient. Operators of both as
``_KERNELS`` counts a layer of transformers: 81 of its 100 reach torch's dispatcher, and a branch adds 14 to these with
casts, 10 without (counted by a dispatch mode, peft 0.21)."""
_COMPILED_BRANCH = Branch(0.0, 6.0, 4.0, 4.0, 4)
"""Product and sum are one operator, in backward too."""


def branch_of(workload: Workload) -> Branch:
    """The branch of the code that ran. In fp32 nothing is cast, and elements are twice as wide. Where weights are
    quantised, peft leaves casts to autocast (peft/tuners/lora/bnb.py, requires_conversion)."""
    how, base = workload.execution, quantised(workload.job.lora)
    if how.precision == "fp32":
        return Branch(*(2 * each for each in _BRANCH))._replace(kernels=_BRANCH.kernels)
    cast = how.casts_adapters and base is None
    return _COMPILED_BRANCH if how.code == "compiled" else _CAST_BRANCH if cast else _BRANCH


def dequantised_bytes(workload: Workload) -> tuple[float, float]:
    """Bytes moved to dequantise the mean layer's weights, and to quantise the activations of 8-bit GEMMs: (for forward,
    for backward). Backward finds experts as forward left them."""
    model, lora, tokens = workload.model, workload.job.lora, workload.tokens
    base = quantised(lora)
    if lora is None or base is None:
        return 0.0, 0.0
    layers, (of_input, of_output) = linear_layers(model), base.moved_by_token
    linear = sum(each.number * each.inputs * each.outputs for each in layers) / workload.layout.tp
    forward, backward = (each * linear for each in base.moved)
    forward += tokens * sum(each.number * (of_input * each.inputs + of_output * each.outputs) for each in layers)
    if lora.quantize_moe_experts:
        forward += base.moved[0] * count(model).layer.experts * (model.num_layers - model.first_dense_layers)
    return forward / model.num_layers, backward / model.num_layers


def _adapter_kernels(workload: Workload) -> float:
    """Operators of the mean layer's branches, and of its quantised weights."""
    model, lora = workload.model, workload.job.lora
    if lora is None:
        return 0.0
    kernels = branch_of(workload).kernels * sum(each.number for each in workload.adapted)
    if lora.quantised:
        # Of experts gate and up are one tensor, down is another.
        experts = 2 * (model.num_layers - model.first_dense_layers) if lora.quantize_moe_experts else 0
        kernels += QUANTISED[lora.quantised].kernels * (sum(each.number for each in linear_layers(model)) + experts)
    return kernels / model.num_layers


def layer_kernels(workload: Workload, has_experts: bool) -> float:
    """Operators that the host launches for one layer in forward; 0 with full CUDA graphs."""
    how = workload.execution
    if how.graphs == "full":
        return 0.0
    low, kernels = how.precision in LOW_PRECISIONS, 0.0
    if how.graphs == "none":
        casts = _EAGER_CAST_KERNELS if how.linear_layers_only and how.code != "compiled" else 0.0
        kernels = _KERNELS[how.code] + (_FP8_KERNELS if low else 0.0) + casts + _adapter_kernels(workload)
    if has_experts:
        experts = workload.model.num_experts / workload.layout.ep
        kernels += _ROUTING_KERNELS + _EXPERT_KERNELS[how.code] * experts * (1.5 if low else 1.0)
    return kernels


def hooks(workload: Workload) -> float:
    """What the hooks of ZeRO-3 around a layer's modules and weights cost the host in each pass, forward, recomputation
    and backward, in operators. DeepSpeed 0.19's took 1.9, 1.8 and 1.7 ms a Llama layer of transformers that took 0.24
    without them (CPU time of one process, all matrices partitioned). DeepCompile has none."""
    how, stage = workload.execution, workload.layout.zero_stage
    return 225.0 if how.engine == "deepspeed" and stage == 3 and not how.deepcompile else 0.0


def recompute_launches(workload: Workload) -> tuple[float, float]:
    """(forward, recompute) launch time, relative to a forward without recompute. torch's checkpoint wraps every saved
    tensor in hooks: for a Llama layer of transformers the host takes 1.5 times as long in forward and twice as long in
    the recomputation (measured on a CPU, as above). Policies are called for every operator: 4.5 times in both, where
    the checkpoint alone took 1.9 and 2.4 times beside it."""
    if workload.recomputes_by_operator:
        return 4.5, 4.5
    if workload.layout.recompute != "full":
        return 1.0, 0.0
    return (1.5, 2.0) if workload.execution.code == "huggingface" else (1.0, 1.0)


def layer_elementwise_bytes(workload: Workload, has_experts: bool) -> float:
    """Bytes that element-wise operators move in the forward of one layer, for one micro batch on one rank."""
    model, tp, tokens, outer = workload.model, workload.layout.tp, workload.tokens, workload.shard_tokens
    h, width = model.hidden_size, _mlp_width(workload, has_experts)
    rotated = 0.0 if model.learned_positions else (model.query_width + model.key_value_width) / tp
    norm, residual, rotation, _ = _operators(workload)
    residual += 1.0 if workload.hidden_dropout else 0.0
    total = 2 * (norm + residual) * h * outer + tokens * rotation * rotated
    total += activation_bytes(workload, width) + _routing_bytes(workload, has_experts)
    if workload.job.lora is not None:
        weights, outputs, _ = dora_sizes(model, workload.job.lora)
        total += _DORA_WEIGHT * weights + _DORA_OUTPUT * outputs * tokens
    if workload.execution.linear_layers_only:
        return total + _torchao_activation_casts(workload, has_experts)
    return total + _quantised(workload, width)


def element_bytes(workload: Workload) -> float:
    """Bytes of an element that these operators read or write."""
    return 4.0 if workload.execution.precision == "fp32" else 2.0


def _mlp_width(workload: Workload, has_experts: bool) -> float:
    """Width of a layer's MLP on a rank: of all experts of a token and the shared one."""
    model = workload.model
    routed = workload.routed_per_token * model.moe_ffn_hidden_size + model.shared_ffn_hidden_size
    return (routed if has_experts else model.ffn_hidden_size) / workload.layout.tp


def activation_bytes(workload: Workload, width: float) -> float:
    """Bytes that the activation of an MLP of ``width`` moves in forward, for one micro batch on one rank."""
    return _operators(workload)[3] * width * workload.tokens


def _routing_bytes(workload: Workload, has_experts: bool) -> float:
    """Bytes of tokens that are permuted, sent, received and sorted on the way to their experts and back; each copy is
    read and written."""
    copied = workload.routed_per_token * workload.model.hidden_size if has_experts else 0.0
    return 6 * element_bytes(workload) * copied * workload.tokens / workload.layout.tp


def recomputed_bytes(workload: Workload, has_experts: bool) -> float:
    """Bytes that element-wise operators move again where backward recomputes ``recompute_modules``."""
    model, modules = workload.model, workload.recompute_modules
    whole = {"moe", "moe_act"} if has_experts else {"mlp"}
    moved = activation_bytes(workload, _mlp_width(workload, has_experts)) if modules & whole else 0.0
    moved += _routing_bytes(workload, has_experts) if "moe" in modules else 0.0
    norm = _operators(workload)[0]
    return moved + (2 * norm * model.hidden_size * workload.shard_tokens if "layernorm" in modules else 0.0)


_DORA_WEIGHT, _DORA_OUTPUT = 34.0, 38.0
"""Bytes that DoRA moves in forward, without fusion (peft/tuners/lora/dora.py): per element of a weight for the length
of its rows (B·A 4, cast 6, scale 8, sum 12, norm 4), per output and token for its factors (12, 8, 12, 6)."""


def _operators(workload: Workload) -> tuple[float, float, float, float]:
    """Bytes moved per element: (norm, residual, RoPE, activation of the MLP)."""
    code, gated, element = workload.execution.code, workload.model.gated_mlp, element_bytes(workload)
    if code == "huggingface":
        # RMSNorm in fp32 with casts.
        return (36.0 if element == 2 else 40.0), 3 * element, 5 * element, 5 * element
    if code == "eager":
        return 2 * element, 3 * element, 10 * element, (5 if gated else 2) * element
    if code == "local":
        # RoPE: two products, one copy, one sum. SwiGLU: silu, up + offset, product.
        return 2 * element, 3 * element, 5 * element * 2, 7 * element
    # A fused operator reads its inputs and writes its output once.
    return 2 * element, 3 * element, 2 * element, (3 if gated else 2) * element


def _quantised(workload: Workload, width: float) -> float:
    """Bytes moved to quantise the inputs of 8- and 4-bit GEMMs: read once, write one copy per memory layout."""
    precision, model = workload.execution.precision, workload.model
    if precision not in LOW_PRECISIONS:
        return 0.0
    inputs = (2 * model.hidden_size + model.value_width / workload.layout.tp + width) * workload.tokens
    return (6.0 if precision == "fp8" else 4.0) * inputs


def _torchao_activation_casts(workload: Workload, has_experts: bool) -> float:
    """Bytes moved to cast the inputs of torchao's 8-bit GEMMs (torchao/float8, 0.18), in the forward of one layer and
    one micro batch. Backward casts as many gradients and inputs.

    A cast reads its operand twice: for the largest value, and to write the 8-bit copy. With torch.compile a block casts
    a shared input once. Without it every linear layer casts its own input through an absolute value and fp32, scaled
    and clamped copies.
    """
    model, h = workload.model, workload.model.hidden_size
    # Routed experts are not linear layers, so torchao leaves them in 16 bits.
    width = model.shared_ffn_hidden_size if has_experts else model.ffn_hidden_size
    if workload.execution.code == "compiled":
        return _COMPILED_CAST_BYTES * (2 * h + model.value_width + width) * workload.tokens
    inputs = (5 if model.gated_mlp else 4) * h + model.value_width + width
    return _EAGER_CAST_BYTES * inputs * workload.tokens


def _torchao_weight_casts(workload: Workload) -> float:
    """Bytes moved per fp8 weight to cast it in forward and backward of a micro batch: from fp32 under DDP, from bf16
    after FSDP2's all-gather."""
    element = 4.0 if workload.layout.zero_stage == 0 else 2.0
    if workload.execution.code == "compiled":
        return 2 * (2 * element + 1)
    return 2 * (3 * element + _EAGER_CAST_BYTES - 6)


def loss_elementwise_bytes(workload: Workload) -> float:
    """Bytes that the loss moves per token in forward and backward: cast, log-softmax, its gradient, cast back."""
    entries = workload.model.vocab_size / workload.layout.tp
    if workload.chunked_loss and workload.implementation == "huggingface":
        return _chunked_loss_bytes(workload, entries)
    if workload.compiled_loss or workload.cross_entropy != "unfused":
        return 14.0 * entries
    return (20.0 if workload.implementation in MEGATRON_LAYERS else 36.0) * entries


def _chunked_loss_bytes(workload: Workload, entries: float) -> float:
    """Bytes that the chunked loss moves per token (kit/engines/kernels/chunked_loss.py): eleven operators on fp32
    logits, or three 16-bit reads and one write if compiled. Each chunk also adds a 16-bit GEMM result to the head's
    fp32 gradient."""
    model, fused = workload.model, workload.compiled_loss
    of_head = 12.0 * model.hidden_size / workload.chunk_tokens if workload.job.lora is None else 0.0
    return ((8.0 if fused else 44.0) + of_head) * entries


_COPIED_OUT, _COPIED_IN = 4.0, 6.0
"""FSDP2's memory traffic, bytes: per weight copied out of the all-gather's buffer; per gradient cast and copied into
the reduce-scatter's buffer (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""


def micro_batch_bytes(workload: Workload, parameters: RankParameters) -> float:
    """Bytes that a rank moves per micro batch to cast weights and to copy and add gradients."""
    layout, how = workload.layout, workload.execution
    if how.engine == "megatron":
        added = workload.trained_share(parameters) * parameters.total
        return 0.0 if workload.gradient_accumulation_fusion else how.gradient_sum_bytes * added
    if how.engine == "deepspeed":
        moved = _zero_gradient_bytes(layout.zero_stage, layout.gradient_accumulation_steps)
        return moved * workload.trained_share(parameters) * parameters.total
    cast = workload.weight_bytes == 4 and layout.zero_stage == 0 and how.precision in ("bf16", "fp8")
    moved = 6.0 * parameters.total if cast else 0.0
    if how.engine == "fsdp" and how.copies_gathered:
        moved += (_COPIED_OUT * (2 if layout.zero_stage == 3 else 1)) * parameters.total
        moved += _COPIED_IN * workload.trained_share(parameters) * parameters.total
    if how.linear_layers_only:
        # autocast makes no 16-bit copy of these weights. Their 16-bit gradients are still added to fp32 gradients.
        moved += _torchao_weight_casts(workload) * parameters.dense_matrices
    return moved


def _zero_gradient_bytes(stage: int, micro_batches: int) -> float:
    """Bytes that ZeRO moves per 16-bit gradient and micro batch: copy to the bucket, copy to a flat tensor, divide,
    copy back (4 each). Stage 2 does this in every micro batch, stages 0 and 1 in the last; these also add to the
    accumulated gradient (6). 0 for stage 3, which ``STAGE3_COPIES`` counts."""
    if stage == 3:
        return 0.0
    return 16.0 * (1.0 if stage == 2 else 1.0 / micro_batches) + (6.0 if micro_batches > 1 and stage < 2 else 0.0)


_ZERO_STEP_BYTES = 36.0
"""Additional memory traffic of a ZeRO step per parameter, bytes: flatten gradients (4), cast them to fp32 (6), norm in
fp64 (18), test for infinity and NaN (8) (DeepSpeed, runtime/zero/stage3.py and stage_1_and_2.py: step)."""


def optimizer_bytes_per_parameter(workload: Workload) -> float:
    """Bytes that the optimizer step moves per parameter: read weight and gradient, write weight (12); read and write
    the moments; norm and clipping (12); cast to 16 bits (2); DeepSpeed's additional passes. With bf16 optimizer state
    only the moments are counted in half: no step with it was measured."""
    more = 0.0 if workload.execution.precision == "fp32" else 2.0
    more += _ZERO_STEP_BYTES if workload.execution.engine == "deepspeed" and workload.layout.zero_stage else 0.0
    halved = 0.5 if workload.layout.optimizer_state_dtype == "bf16" else 1.0
    return 24.0 + 2 * halved * OPTIMIZERS[workload.job.optimizer.name].moments.rest + more

"""Bytes per parameter: weights, gradients and optimizer state, per engine and ZeRO stage.

Ψ is the number of parameters (ZeRO paper, arXiv 1910.02054, section 3.1); N the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kit.cost.model.lora import linear_layers
from kit.specs.job import LoraSpec, OptimizerName, Precision
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS, Moments

NF4_CODES = 0.5
"""Bytes of a weight in nf4 without its scales."""
NF4_TWICE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight with double quantisation (QLoRA, arXiv 2305.14314, section 3): four bits, an 8-bit scale per block
of 64, and an fp32 scale per 256 blocks."""


class Quantised(NamedTuple):
    """Frozen weights of linear layers as bitsandbytes keeps them, and what its layers do with them."""

    codes: float
    """Bytes of a weight without its scales."""
    scales: Callable[[ModelSpec], float]
    """Bytes of scales per weight of a model. They are no parameters: every rank has all of them."""
    moved: tuple[float, float]
    """Bytes per weight that dequantising moves: (before forward's GEMM, before backward's)."""
    moved_by_token: tuple[float, float] = (0.0, 0.0)
    """Bytes that quantising a GEMM's activations moves in forward, for each token: (per input, per output)."""
    kernels: int = 7
    """Operators that a linear layer launches for this in forward."""
    keeps_inputs: bool = False
    """Whether the layer's autograd function keeps its input itself, which torch's checkpoint does not free."""


def _scale_a_row(model: ModelSpec) -> float:
    layers = linear_layers(model)
    rows = sum(each.number * each.outputs for each in layers)
    return 4.0 * rows / sum(each.number * each.inputs * each.outputs for each in layers)


QUANTISED = {
    # Scales, their mean, codes (bitsandbytes/functional.py, dequantize_4bit; autograd/_functions.py, MatMul4Bit).
    "four_bit": Quantised(NF4_CODES, lambda _: NF4_TWICE_BYTES - NF4_CODES, (NF4_TWICE_BYTES + 2.0,) * 2),
    # autograd/_functions.py, MatMul8bitLt on a GPU. Forward multiplies codes. Of its input: cast to fp16 (4), abs (4),
    # comparison with the threshold (3), any (1), quantisation (3). Of its output: int32 instead of 16 bits (2), fp16
    # (6), bf16 (4). Columns of outliers are not counted, nor GEMMs as faster ones. Backward: codes to 16 bits (3),
    # times the rows' scales (4). ctx.tensors has the input, which no backward of a frozen weight reads.
    "eight_bit": Quantised(1.0, _scale_a_row, (0.0, 7.0), (15.0, 12.0), kernels=10, keeps_inputs=True),
}
"""Field of ``LoraSpec`` that asks for it → what it takes (bitsandbytes 0.50)."""


def quantised(lora: LoraSpec | None) -> Quantised | None:
    """The row of a job's adapters; None: no weights are quantised."""
    return None if lora is None else QUANTISED.get(lora.quantised)


class StateBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer state on one rank: per parameter, or of all that the rank has. A field
    about gradients is for one moment of the step."""

    weights: float
    optimizer: float
    """Master weights, if they are a copy, and moments."""
    gradients_in_forward: float
    """Gradients during forward; 0 if backward allocates them and the step frees them."""
    gradients: float
    """Gradients at the end of backward, their peak."""
    gradients_in_step: float
    """Gradients after their reduction, when the optimizer step begins."""
    gradients_between_steps: float
    """Gradients after the optimizer step."""
    extra_in_step: float = 0.0
    """fp32 copies of gradients, only during the optimizer step."""
    optimizer_of_matrices: float | None = None
    """Per parameter, ``optimizer`` for matrices of layers where it differs (Muon); null: the same."""
    optimizer_of_vectors: float | None = None
    """Per parameter, ``optimizer`` for norms and biases where it differs (8-bit AdamW); null: the same."""

    @classmethod
    def with_gradients(cls, gradients: float, *, weights: float, optimizer: float) -> StateBytes:
        """States whose gradients are the same at every moment of a step."""
        return cls(
            weights=weights,
            optimizer=optimizer,
            gradients_in_forward=gradients,
            gradients=gradients,
            gradients_in_step=gradients,
            gradients_between_steps=gradients,
        )


NO_STATES = StateBytes.with_gradients(0.0, weights=0.0, optimizer=0.0)


def moment_bytes(layout: Layout, optimizer: OptimizerName = "adamw") -> Moments:
    """Bytes per parameter of the moments, in the dtype that the layout gives them."""
    moments = OPTIMIZERS[optimizer].moments
    if layout.optimizer_state_dtype == "fp32":
        return moments
    if moments.vectors is not None:  # 8 bits, but for these
        return moments._replace(vectors=moments.vectors / 2)
    return Moments(moments.matrices / 2, moments.rest / 2)


def weight_element(layout: Layout, precision: Precision) -> float:
    """Bytes of a model weight under ZeRO."""
    return 4.0 if precision == "fp32" or layout.autocast else 2.0


def state_bytes(layout: Layout, precision: Precision, optimizer: OptimizerName = "adamw") -> StateBytes:
    """Bytes per parameter that the engine keeps on the device."""
    moments = moment_bytes(layout, optimizer)
    gathered = OPTIMIZERS[optimizer].gathered_in_step.get(layout.engine, 0.0)
    if layout.engine == "torch":
        return _torch(layout, moments, gathered)
    if layout.engine == "megatron":
        return _megatron(layout, precision, moments)._replace(extra_in_step=gathered)
    return _deepspeed(layout, precision, moments)


def _torch(layout: Layout, moments: Moments, gathered_in_step: float) -> StateBytes:
    """fp32 weights, gradients and moments: 16 bytes, also under autocast, whose casts are counted as buffers; or all in
    bf16: 8 bytes.

    DDP's gradients are views of its buckets (gradient_as_bucket_view), which exist all the time. Otherwise each step
    frees the gradients (zero_grad(set_to_none=True)), so forward has gradients only under gradient accumulation. FSDP2
    shards everything at stages 2 and 3; gathered weights are counted as buffers. An 8-bit optimizer casts bf16
    gradients to fp32, one parameter at a time; some optimizers gather one whole parameter at a time.
    """
    if layout.offload_param != "none":  # everything is on the host between its uses
        return NO_STATES
    ranks = layout.dense_dp if layout.zero_stage >= 2 else 1
    stay = layout.gradient_accumulation_steps > 1 or (layout.dp > 1 and layout.zero_stage == 0)
    short = layout.gradient_dtype == "bf16" or layout.master_bytes == 2
    casts = short and moments.vectors is not None
    gradients = (2.0 if short else 4.0) / ranks
    powersgd_error = 4.0 if layout.gradient_compression == "powersgd" else 0.0
    return _with(
        StateBytes(
            weights=layout.master_bytes / ranks,
            gradients=gradients,
            gradients_in_forward=gradients if stay else 0.0,
            optimizer=moments.rest / ranks + powersgd_error,
            gradients_in_step=gradients,
            gradients_between_steps=gradients if stay else 0.0,
            extra_in_step=4.0 / ranks if casts else gathered_in_step,
        ),
        moments,
        0.0,
        ranks,
    )


def _megatron(layout: Layout, precision: Precision, moments: Moments) -> StateBytes:
    """18 bytes, or 6 + 12/d with the distributed optimizer (megatron-core, docs of dist_optimizer).

    Gradients are accumulated in one permanent buffer, in fp32 (grad_reduce_in_fp32) or in bf16. Of bf16 gradients the
    step makes fp32 copies, of its own shard under the distributed optimizer (distrib_optimizer.py,
    _copy_model_grads_to_main_grads), unless the optimizer reads them as they are (precision-aware). In fp32 the
    weights are the master weights: 16 bytes, or 8 + 8/d.
    """
    ranks = layout.dense_dp if layout.zero_stage else 1
    weights, masters = (4.0, 0.0) if precision == "fp32" else (2.0, layout.master_bytes)
    short = layout.gradient_dtype == "bf16"
    gradients = 2.0 if short else 4.0
    if layout.offload_optimizer != "none":  # gradients stay; masters and moments leave, or a share of them
        kept = (1 - layout.optimizer_offload_fraction) * (masters + moments.rest) / ranks
        return StateBytes.with_gradients(gradients, weights=weights, optimizer=kept)
    copies = 4.0 / ranks if short and layout.optimizer_state_dtype == "fp32" else 0.0
    state = StateBytes.with_gradients(gradients, weights=weights, optimizer=(masters + moments.rest) / ranks)
    return _with(state._replace(gradients_in_step=gradients + copies), moments, masters, ranks)


def _with(state: StateBytes, moments: Moments, masters: float, ranks: float) -> StateBytes:
    """``state`` with separate optimizer bytes of matrices and vectors, if the optimizer's moments differ there."""

    def own(moment: float | None) -> float | None:
        return None if moment is None or moment == moments.rest else (masters + moment) / ranks

    if moments.matrices == moments.rest and moments.vectors is None:
        return state
    return state._replace(optimizer_of_matrices=own(moments.matrices), optimizer_of_vectors=own(moments.vectors))


def _deepspeed(layout: Layout, precision: Precision, moments: Moments) -> StateBytes:
    """DeepSpeed 0.19: runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py, fp16/unfused_optimizer.py.

    Differences from the paper: in fp32 too, master weights are a copy (stage_1_and_2.py,
    single_partition_of_fp32_groups). stage3.py, _create_fp32_partitions, means to share them, but it compares a device
    with a device name. For gradients see ``_deepspeed_gradients``. Every term was checked against the engine's tensors
    (docs/deepspeed-bytes.md).
    """
    stage, ranks, element = layout.zero_stage, layout.dense_dp, weight_element(layout, precision)
    short = element == 2.0
    fullest, in_forward, in_step, between = _deepspeed_gradients(layout, precision)
    masters = layout.master_bytes if short or stage >= 1 else 0.0
    shards = ranks if stage >= 1 else 1
    # The step casts gradients to the dtype of the master weights, unless they have it already: 16-bit gradients do not
    # have fp32, and the fp32 sums of stages 1 and 2 do not have bf16.
    summed = layout.gradient_accumulation_steps > 1 and stage in (1, 2)
    casts = short and summed == (layout.optimizer_state_dtype == "bf16")
    step_copy = layout.master_bytes / shards if casts else 0.0
    offloaded = layout.offload_optimizer != "none"
    state = StateBytes(
        weights=0.0 if layout.offload_param != "none" else element / (ranks if stage >= 3 else 1),
        gradients=fullest,
        gradients_in_forward=in_forward,
        optimizer=0.0 if offloaded else (masters + moments.rest) / shards,
        gradients_in_step=in_step,
        gradients_between_steps=between,
        extra_in_step=0.0 if offloaded else step_copy,
    )
    return state if offloaded else _with(state, moments, masters, shards)


def _deepspeed_gradients(layout: Layout, precision: Precision) -> tuple[float, float, float, float]:
    """Bytes of gradients per parameter on the device: at the end of backward, in forward, in the step, after the step.

    With gradient accumulation, 16-bit gradients are summed in fp32 (data_types.grad_accum_dtype, set by kit). Stages 2
    and 3 shard the sum; stage 1 keeps it unsharded, in addition to the bf16 gradients (bf16_optimizer.py). Optimizer
    offload copies each gradient to the host (async_inplace_copy_grad_to_fp32_buffer_from_gpu). But the fp32 sums of
    stages 1 and 2 stay on the device (stage_1_and_2.py, _build_compact_grad_partition_buffer).
    """
    stage, ranks, element = layout.zero_stage, layout.dense_dp, weight_element(layout, precision)
    accumulates = layout.gradient_accumulation_steps > 1
    sums_in_fp32 = element == 2.0 and accumulates
    offloaded = layout.offload_optimizer != "none"
    if stage == 0:
        return element, element if accumulates else 0.0, element, 0.0
    if stage == 1 and sums_in_fp32 and precision == "bf16" and not offloaded:
        return 6.0, 6.0, 6.0, 4.0
    # This rank's shard of the gradients, summed over micro batches.
    own = (4.0 if sums_in_fp32 else element) / ranks
    if offloaded and not (sums_in_fp32 and stage < 3):
        own = 0.0
    if stage == 3:
        return own, own, own, own  # a permanent flat buffer (grad_partitions_flat_buffer)
    if stage == 2:
        return own, own if accumulates else 0.0, own, 0.0
    # Stage 1 sums unsharded gradients. After the last micro batch's reduction each rank frees all but its shard.
    whole = 4.0 if sums_in_fp32 else element
    return whole + (own if sums_in_fp32 else 0.0), whole if accumulates else 0.0, own, 0.0

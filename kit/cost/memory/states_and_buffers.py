"""Memory of an engine without activations: states, buffers, gathered weights, casts.

A search asks for tens of thousands of layouts of one model, so results that do not depend on the micro batch are
cached.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from kit.cost.memory import deepspeed_sizes
from kit.cost.memory.parts import EngineMemory
from kit.cost.memory.states import NF4_TWICE_BYTES, Quantised, StateBytes, quantised, state_bytes
from kit.cost.model.lora import adapter_parameters_of
from kit.cost.model.params import RankParameters, count
from kit.cost.model.pipeline import stage_layers
from kit.cost.workload import Workload
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.units import to_gib

_ZERO3_SUB_GROUP = 10**9
"""Parameters per sub group of a ZeRO-3 step, DeepSpeed's default (runtime/zero/config.py)."""


def engine_memory(workload: Workload) -> EngineMemory:
    """Memory of the engine on every rank. It depends on whether there are several micro batches, not on how many or how
    large, nor on the chunks of a stage and on how sequences are exchanged, so many layouts share one cached result."""
    steps = min(2, workload.layout.gradient_accumulation_steps)
    shared = {"micro_batch_size": 1, "gradient_accumulation_steps": steps, "vp": 1, "cp_comm_type": "all_gather"}
    return _engine_memory(workload.with_layout(workload.layout.but(**shared)))


@lru_cache(maxsize=4096)
def _engine_memory(workload: Workload) -> EngineMemory:
    model, job, layout = workload.model, workload.job, workload.layout
    precision, optimizer, lora = job.precision, job.optimizer.name, job.lora
    dense = state_bytes(layout, precision, optimizer)
    # Experts are replicated over other ranks than dense parameters, so they are sharded over another group.
    experts = state_bytes(layout.but(dp=layout.expert_dp, cp=1, tp=1), precision, optimizer)
    buffers, gathered = _engine_buffers(workload)
    # torchao casts fp32 weights to 8 bits in each GEMM and frees the copy.
    in_layers = 0.0 if precision == "fp8" else 2.0 * count(model).layer_matrices
    head = 2.0 * model.vocab_size * model.hidden_size
    # Every GEMM saves the 16-bit cast for its backward; under recompute only the head does.
    again = layout.recompute == "full" or workload.recomputes_by_operator
    casts = workload.autocast and lora is None
    memory = EngineMemory(
        dense=dense,
        experts=experts,
        most_step_extra=_most_step_extra(workload),
        buffers=buffers,
        gathered=gathered,
        root_is_last=layout.engine == "torch" and layout.zero_stage > 0,
        autocast_copies=(in_layers + head, head if again else in_layers + head) if casts else (0.0, 0.0),
        deferred_head_gradient=_deferred_head_gradient(workload),
        load=_load_bytes(workload, dense),
        save=_exported_bytes(model, layout, job),
    )
    return memory if lora is None else _with_adapters(memory, workload, lora)


def _load_bytes(workload: Workload, state: StateBytes) -> float:
    """Bytes while DeepSpeed's engine is built; 0: no more than between steps, as on other engines, which fill sharded
    weights one by one. ``state``: bytes per parameter between steps."""
    layout, lora = workload.layout, workload.job.lora
    if layout.engine != "deepspeed":
        return 0.0
    (parameters,) = workload.parameters
    whole = float(workload.element) * count(workload.model).total
    # AutoTP splits whole weights (kit/engines/deepspeed/autotp.py). Those that share memory take little.
    split_later = layout.tp > 1 and layout.implementation == "huggingface"
    if lora is None:
        return _flattening(workload, state) if layout.zero_stage in (1, 2) else whole if split_later else 0.0
    if lora.four_bit and layout.zero_stage == 3:
        # kit quantises whole weights and shards them afterwards (kit/engines/deepspeed/data_parallel.py).
        return NF4_TWICE_BYTES * parameters.dense_matrices + 2.0 * (parameters.total - parameters.dense_matrices)
    return whole if split_later else 0.0


def _flattening(workload: Workload, state: StateBytes) -> float:
    """Bytes while DeepSpeed's stages 1 and 2 copy the weights into one flat buffer, and make the rank's master weights
    of it (stage_1_and_2.py, __init__; bf16_optimizer.py, _setup_for_real_optimizer): by a clone, and with gradients of
    their size for a moment (initialize_optimizer_states)."""
    layout = workload.layout
    (parameters,) = workload.parameters
    weights, own = state.weights * parameters.total, parameters.total / layout.dense_dp
    # Vectors are flattened last, and keep until then what all weights shared (kit/engines/deepspeed/whole_model.py).
    shared = state.weights * deepspeed_sizes.largest_parameter(workload.model) / layout.tp
    masters = 0.0 if layout.offload_optimizer != "none" else layout.master_bytes * own
    sums = state.gradients_between_steps * parameters.total
    beside = max(shared + max(state.weights * own, sums), 0.0 if sums else masters)
    cloned = weights + masters + beside
    twice = deepspeed_sizes.owns_weights(workload) and deepspeed_sizes.fits_twice(workload)
    return max(2 * weights, cloned) if twice else cloned


def _most_step_extra(workload: Workload) -> float:
    """Bytes of fp32 gradients that a step converts at a time: DeepSpeed's ZeRO-3 a sub group, the torch engine a
    parameter. An optimizer of whole matrices gathers them first, on the torch engine or Megatron."""
    model, layout = workload.model, workload.layout
    gathered = OPTIMIZERS[workload.job.optimizer.name].gathered_in_step.get(layout.engine, 0.0)
    if layout.engine == "torch":
        return (gathered or 4.0 / layout.dense_dp) * deepspeed_sizes.largest_parameter(model)
    if layout.engine == "megatron":
        return gathered * deepspeed_sizes.largest_layer_matrix(model)
    sizes = deepspeed_sizes.buffer_sizes(model, workload.cluster, layout) if layout.zero_stage == 3 else {}
    return 4.0 * sizes.get("sub_group_size", _ZERO3_SUB_GROUP) if layout.zero_stage == 3 else float("inf")


def _deferred_head_gradient(workload: Workload) -> float:
    model, layout = workload.model, workload.layout
    fsdp = layout.engine == "torch" and layout.zero_stage > 0
    if not model.tied_embeddings or fsdp or layout.implementation != "huggingface":
        return 0.0
    element = 4.0 if workload.job.precision == "fp32" or workload.autocast else 2.0
    return element * model.vocab_size * model.hidden_size


def _exported_bytes(model: ModelSpec, layout: Layout, job: JobSpec) -> float:
    """Bytes that an export gathers or dequantises on the device: the largest tensor, and under DeepSpeed one 8-bit
    moment of the rank's partition (kit/engines/deepspeed/state.py, open_moments; of adapters it is small). 0 if the
    export copies fp32 state to the host without a temporary: replicas, and the shards of the torch engine."""
    opened, optimizer = 0, job.optimizer.name
    if layout.engine == "deepspeed" and optimizer.endswith("-8bit") and job.lora is None:
        ranks = layout.tp * (layout.dense_dp if layout.zero_stage else 1)
        opened = ceil(count(model).total / ranks)
    if layout.implementation == "huggingface":
        whole = layout.zero_stage == 0 or layout.engine == "torch"
        as_they_are = whole and not OPTIMIZERS[optimizer].exports_a_copy
        return 4.0 * (opened + (0 if as_they_are else deepspeed_sizes.largest_parameter(model)))
    return _gathered_element(layout.tp) * (opened + _largest_of_megatron(model))


def _gathered_element(tp: int) -> float:
    """Bytes per element of a tensor of Megatron's that an export gathers: fp32 shards, which it concatenates if ``tp``
    > 1 (kit/engines/megatron/resharding/huggingface.py)."""
    return 8.0 if tp > 1 else 4.0


def _largest_of_megatron(model: ModelSpec) -> int:
    return max(deepspeed_sizes.largest_layer_matrix(model), model.vocab_size * model.hidden_size)


def least_megatron_gib(
    model: ModelSpec, job: JobSpec, gpus: int, tp: int, pp: int, expert_ranks: int, kept: float = 1.0
) -> float:
    """Lower bound of the memory of Megatron's fullest rank, GiB: weights and gradients of the mean stage, optimizer
    state sharded over all GPUs, and the tensor that an export gathers.

    ``expert_ranks``: ep · etp; ``kept``: bytes of optimizer state on the GPUs over those in fp32, less than 1 if the
    state is in bf16 or on the host. With LoRA the bound is 0. A search uses it to skip splits before it lists layouts.
    """
    if job.lora is not None:
        return 0.0
    counts, moments = count(model), OPTIMIZERS[job.optimizer.name].moments
    weights, masters = (4.0, 0.0) if job.precision == "fp32" else (2.0, 4.0)
    experts = counts.sum_over(range(model.num_layers), lambda layer: layer.experts)
    of_rank = ((counts.total - experts) / tp + experts / expert_ranks) / pp
    states = (weights + 4.0) * of_rank
    states += kept * (masters + min(moments[:2])) * counts.total / gpus
    return to_gib(states + _gathered_element(tp) * _largest_of_megatron(model))


def _with_adapters(memory: EngineMemory, workload: Workload, lora: LoraSpec) -> EngineMemory:
    """``memory`` of a LoRA run: a frozen base in 16, 8 or 4 bits, and adapters with their states. DeepSpeed treats
    adapters as any trained parameter. The torch engine stores them in fp32 (16 bytes with AdamW's moments); FSDP2
    shards them.

    Frozen weights are loaded one by one in their final precision (kit/engines/huggingface/adapters.py, build_frozen),
    so autocast has nothing to cast. A GEMM dequantises its weight for the time of the GEMM, in 8 bits backward's alone
    (bitsandbytes/autograd/_functions.py).
    """
    model, layout, base = workload.model, workload.layout, quantised(lora)
    each = adapter_parameters_of(model, lora, layout.tp) / model.num_layers
    adapters = tuple(each * len(stage_layers(model, layout, stage)) for stage in range(layout.pp))
    dense = of_adapters = memory.dense
    gathered, matrix_weights, share = memory.gathered, None, 0.0
    in_host = layout.offload_param != "none"
    if layout.engine == "torch":
        sharded = layout.zero_stage > 0
        if workload.job.precision == "bf16":
            dense = dense._replace(weights=dense.weights / 2)  # frozen weights have no fp32 master weights
        own = 4.0 / (layout.dense_dp if sharded else 1)
        moments = OPTIMIZERS[workload.job.optimizer.name].moments.matrices * own / 4
        if not in_host:
            of_adapters = StateBytes.with_gradients(own, weights=own, optimizer=moments)
        if sharded:
            gathered = _frozen_fsdp_buffers(workload, base)
    if base is not None:
        # Experts of a layer are dequantised together (bitsandbytes/nn/parametrize.py), linear layers one by one.
        layer = count(model).layer
        share = layer.experts / layer.routed if lora.quantize_moe_experts else 0.0
        one = 2.0 * max(deepspeed_sizes.largest_layer_matrix(model), share * layer.routed)
        gathered = (gathered[0] + one, gathered[1] + one, gathered[2])
        owners = layout.dense_dp if layout.zero_stage == 3 or (layout.engine == "torch" and layout.zero_stage) else 1
        matrix_weights = (0.0 if in_host else base.codes / owners) + base.scales(model)
    return memory._replace(
        adapters=adapters,
        deferred_head_gradient=0.0,
        of_adapters=of_adapters,
        dense=dense,
        matrix_weights=matrix_weights,
        quantised_experts=share,
        autocast_copies=(0.0, 0.0),
        gathered=gathered,
    )


def _frozen_fsdp_buffers(workload: Workload, base: Quantised | None) -> tuple[float, float, float]:
    """``fsdp_buffers`` for frozen weights, which have no gradients; quantised weights are gathered as codes."""
    counts, layout, element = count(workload.model), workload.layout, float(workload.element)
    root = element * (counts.total - counts.layers)
    per_matrix = element if base is None else base.codes
    rest = counts.layer.total - counts.layer.matrices
    layer = (per_matrix * counts.layer.matrices + element * rest) / layout.tp
    kept = layer * counts.num_layers if layout.zero_stage == 2 else 0.0
    # A rank's own part of the next layer is copied from the host before it is gathered.
    own = layer / layout.dense_dp if layout.offload_param != "none" else 0.0
    return root + kept, root + max(kept, 2 * layer + own), root


def _engine_buffers(workload: Workload) -> tuple[float, tuple[float, float, float]]:
    """Bytes of gathered weights and buckets: (permanent, temporary), the latter in the loss, in a layer's backward and
    at the end of backward. Zero for Megatron and DDP, whose buckets are the gradients."""
    model, layout = workload.model, workload.layout
    if layout.engine == "megatron" or layout.zero_stage == 0:
        return 0.0, (0.0, 0.0, 0.0)
    element = float(workload.element)
    if workload.fsdp_unit == "model":
        # Reduced in the dtype of the gradients, as accelerate sets it (utils/dataclasses.py, set_mixed_precision).
        whole = element * count(model).total
        return 0.0, (whole, whole + element * (count(model).head or count(model).embedding), 2 * whole)
    if layout.engine == "torch":
        return 0.0, _fsdp_buffers(model, layout, element)
    element = 4.0 if layout.autocast else element
    sizes, largest = (
        deepspeed_sizes.buffer_sizes(model, workload.cluster, layout),
        deepspeed_sizes.largest_parameter(model),
    )
    if layout.zero_stage < 3:
        # temp_grad_buffer_for_gpu_offload; buckets twice: contiguous_gradients with overlap_comm
        resident = element * largest if layout.offload_optimizer != "none" else 0.0
        buckets = 2 * sizes["reduce_bucket_size"] * element
        return resident, (0.0, buckets, buckets)
    # Under autocast, gradients of matrices have a bf16 bucket and other gradients an fp32 bucket.
    resident = (element + (2.0 if layout.autocast else 0.0)) * sizes["reduce_bucket_size"]
    prefetched = sizes["stage3_prefetch_bucket_size"] / layout.tp
    # The largest parameter is whole while it is in use, even above stage3_max_live_parameters.
    live = max(sizes["stage3_max_live_parameters"], largest) / layout.tp + prefetched
    if layout.offload_param == "nvme":
        # Each weight is released after its use (stage3_max_reuse_distance=0 in kit/emit/deepspeed.py).
        live = min(live, largest + 2 * prefetched)
    live += deepspeed_sizes.persistent_parameters(model, sizes["stage3_param_persistence_threshold"]) / layout.tp
    # hpZ keeps a second shard of the weights on each rank, from the first all-gather of a step to the optimizer step.
    second_copy = element * count(model).total / layout.tp / layout.zero_hpz if layout.zero_hpz > 1 else 0.0
    gathered = live * element + second_copy
    return resident, (gathered, gathered, gathered)


def _fsdp_buffers(model: ModelSpec, layout: Layout, element: float) -> tuple[float, float, float]:
    """FSDP2's buffers in kit's torch engine. With bf16 gradients, the reduce-scatter of a unit first writes fp32
    gradients. With state on the host these wait there for their copy, and a rank's part of the next unit comes in fp32
    (_fsdp_collectives.py, foreach_reduce; _fsdp_param.py, all_gather_inputs)."""
    short, on_host = "bf16" in (layout.gradient_dtype, layout.optimizer_state_dtype), layout.offload_param != "none"
    counts = count(model)
    elsewhere = counts.layer.routed * (1 - 1 / layout.ep)  # experts of other ranks, which no one gathers here
    layers = counts.layers / layout.tp - (counts.num_layers - counts.first_layers) * elsewhere
    return fsdp_buffers(
        root=counts.total - counts.layers,
        head=counts.head or (counts.embedding - counts.positions),
        layer=counts.layer.total / layout.tp - elsewhere,
        attention=counts.layer.attention / layout.tp,
        after_forward=layers if layout.zero_stage == 2 else 0.0,
        element=element,
        scattered=4.0 * (2 if on_host else short) / layout.dense_dp,
    )


def fsdp_buffers(
    *,
    root: float,
    head: float,
    layer: float,
    attention: float,
    after_forward: float,
    element: float,
    scattered: float = 0.0,
) -> tuple[float, float, float]:
    """Bytes of FSDP2's gathered weights and unsharded gradients (torch/distributed/fsdp/_fully_shard): in the loss, in
    a layer's backward, at the end of backward. Sizes are numbers of parameters. ``after_forward``: parameters of the
    layers that stay gathered; ``scattered``: bytes per parameter of a reduce-scattered gradient.

    The root unit (embedding, final norm, head) stays gathered from forward to backward; in stage 2 the layers do too.
    In stage 3 one layer computes while the next is gathered. The gradients of a unit exist in the compute dtype and as
    the fp32 input of the reduce-scatter. FSDP2 frees that input only when the next layer's input is ready
    (_fsdp_param_group.py, post_backward). The root's gradients are reduced last; the head's exist from the beginning of
    backward. Activations peak in the MLP's backward, before the gradients of attention exist.
    """
    gathered = max(after_forward, 2 * layer)
    return (
        element * (root + after_forward),
        element * (root + gathered + head + layer - attention) + (4.0 + scattered) * layer,
        (element + 4.0 + scattered) * root,
    )


def rank_states(engine: EngineMemory, parameters: RankParameters, stage: int) -> StateBytes:
    """Weights, gradients and optimizer state of a rank of one pipeline stage."""
    if engine.of_adapters is not None:
        return _adapted(engine, engine.of_adapters, parameters, engine.adapters[stage])
    dense, experts, of_dense, of_experts = parameters.dense, parameters.experts, engine.dense, engine.experts

    optimizer = of_dense.optimizer * dense + of_experts.optimizer * experts
    if of_dense.optimizer_of_matrices is not None:
        rest = parameters.vectors + parameters.vocabulary
        matrices = of_experts.optimizer_of_matrices or 0.0
        optimizer = of_dense.optimizer * rest + of_dense.optimizer_of_matrices * parameters.dense_matrices
        optimizer += matrices * experts
    if of_dense.optimizer_of_vectors is not None:
        optimizer += (of_dense.optimizer_of_vectors - of_dense.optimizer) * parameters.vectors
    extra = of_dense.extra_in_step * dense + of_experts.extra_in_step * experts
    return StateBytes(
        weights=of_dense.weights * dense + of_experts.weights * experts,
        optimizer=optimizer,
        gradients_in_forward=of_dense.gradients_in_forward * dense + of_experts.gradients_in_forward * experts,
        gradients=of_dense.gradients * dense + of_experts.gradients * experts,
        gradients_in_step=of_dense.gradients_in_step * dense + of_experts.gradients_in_step * experts,
        gradients_between_steps=(
            of_dense.gradients_between_steps * dense + of_experts.gradients_between_steps * experts
        ),
        extra_in_step=min(extra, engine.most_step_extra),
    )


def _adapted(engine: EngineMemory, own: StateBytes, parameters: RankParameters, adapters: float) -> StateBytes:
    """States of a LoRA run; the frozen base has neither gradients nor optimizer state."""
    # All experts of a layer are one tensor, not linear layers, and so are quantised only where they are asked for
    # (kit/engines/huggingface/adapters.py).
    matrices = parameters.dense_matrices + engine.quantised_experts * parameters.experts
    rest = parameters.total - matrices
    per_matrix = engine.dense.weights if engine.matrix_weights is None else engine.matrix_weights
    return StateBytes(
        weights=per_matrix * matrices + engine.dense.weights * rest + own.weights * adapters,
        optimizer=own.optimizer * adapters,
        gradients_in_forward=own.gradients_in_forward * adapters,
        gradients=own.gradients * adapters,
        gradients_in_step=own.gradients_in_step * adapters,
        gradients_between_steps=own.gradients_between_steps * adapters,
        extra_in_step=own.extra_in_step * adapters,
    )

"""A plan's layout as a described run, for memory: model, job and layout become a ``TrainingSetup`` with engine terms.

A search asks for tens of thousands of layouts of one model. What does not depend on the micro batch is worked out once
and kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

from kit.cost import deepspeed_sizes, offload
from kit.cost.adapters import adapter_parameters_of
from kit.cost.params import count, rank_experts, rank_parameters
from kit.cost.pipeline import stage_layers
from kit.cost.plan_setup import shape_of, split_fields
from kit.cost.setup import (
    Attention,
    EngineMemory,
    Generation,
    Kernels,
    Lora,
    RankParameters,
    Shape,
    TrainingSetup,
)
from kit.cost.states import MOMENTS, NF4_TWICE_BYTES, StateBytes, state_bytes
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, LoraSpec, OptimizerName, Precision
from kit.specs.layout import Implementation, Layout
from kit.specs.model import ModelSpec

ZERO3_SUB_GROUP = 10**9
"""Parameters that a stage-3 step converts at a time (runtime/zero/config.py: sub_group_size)."""

Thing = TypeVar("Thing")

_KERNELS: dict[Implementation, Kernels] = {
    "huggingface-sdpa": "huggingface",
    "torch-native": "torch-native",
    "transformer-engine": "transformer-engine",
}
_TARGETS = {
    "attention": frozenset({"query", "key", "value", "projection"}),
    "all-linear": frozenset({"query", "key", "value", "projection", "mlp"}),
}


def planned_setup(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> TrainingSetup:
    """The run that a layout would be."""
    generation = gpu_generation(cluster.gpu.name)
    return TrainingSetup(
        shape=_shape(_ById(model)),
        kernels=_KERNELS[layout.implementation],
        attention=_attention(model, layout.implementation, generation),
        **split_fields(model.num_layers, job, layout),
        weight_bytes=4 if job.precision == "fp32" else 2,
        # Interleaved sends are still read when they would be freed (kit/emit/megatron.py).
        keeps_outputs=layout.pp > 1 and layout.vp > 1,
        lora=_lora(job.lora),
        gpu_generation=generation,
        element=4 if job.precision == "fp32" else 2,
        autocast=uses_autocast(job.precision, layout),
        exchange=layout.cp_comm_type,
        chunked_loss=layout.chunked_loss,
        liger_loss=layout.loss_kernel == "liger",
        compiled_layers=layout.compile_layers,
        planned=_engine_memory(
            _ById(model),
            _ById(cluster),
            job.precision,
            job.optimizer.name,
            job.lora,
            # The rest of a layout does not change states: micro batches only by their being several.
            tuple(getattr(layout, name) for name in _STATE_FIELDS),
            layout.gradient_accumulation_steps > 1,
        ),
    )


def uses_autocast(precision: Precision, layout: Layout) -> bool:
    """Whether fp32 parameters are cast by every matmul: the torch engine, except where FSDP2 gathers them in bf16, and
    DeepSpeed on request."""
    return layout.autocast or (precision != "fp32" and layout.engine == "torch" and layout.zero_stage == 0)


def gpu_generation(name: str) -> Generation:
    """By marketing name; decides attention kernels and the size of workspaces."""
    marks: dict[Generation, tuple[str, ...]] = {
        "blackwell": ("GB200", "B200", "Blackwell", "GB300", "B300"),
        "hopper": ("H100", "H200", "H800", "H20", "GH200"),
        "ampere": ("A100", "A800", "A10", "3090"),
    }
    for generation, names in marks.items():
        if any(mark in name for mark in names):
            return generation
    return "other"


def _attention(model: ModelSpec, implementation: Implementation, generation: Generation) -> Attention:
    """Torch has no kernel of capped scores (kit/engines/megatron/attention.py). Transformer Engine prefers cuDNN's
    kernel on Hopper and later, flash-attn before (dot_product_attention/utils.py, get_attention_backend)."""
    if implementation == "torch-native" and model.attention_softcap is not None:
        return "unfused"
    if implementation == "transformer-engine" and generation in ("hopper", "blackwell"):
        return "cudnn"
    return "flash"


def _lora(spec: LoraSpec | None) -> Lora | None:
    return None if spec is None else Lora(rank=spec.rank, targets=_TARGETS[spec.targets], four_bit=spec.four_bit)


class _ById(Generic[Thing]):
    """A spec by identity: it is frozen, but one that holds a dict has no hash of its own."""

    def __init__(self, thing: Thing) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.thing is self.thing


@lru_cache(maxsize=64)
def _shape(key: _ById[ModelSpec]) -> Shape:
    model = key.thing
    return replace(
        shape_of(model),
        family=model.family,
        traits=model.traits,
        capped_logits=model.logit_softcap is not None,
        parallel_residual=model.parallel_residual,
        shared_norm=model.shared_norm,
        sliding_window=model.sliding_window,
        full_attention_every=model.full_attention_every,
    )


_STATE_FIELDS = (
    "engine",
    "implementation",
    "dp",
    "tp",
    "pp",
    "vp",
    "first_stage_layers",
    "last_stage_layers",
    "cp",
    "ep",
    "etp",
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "zero_hpz",
    "gradient_compression",
    "gradient_dtype",
    "autocast",
    "recompute",
)


@lru_cache(maxsize=4096)
def _engine_memory(
    key: _ById[ModelSpec],
    machines: _ById[ClusterSpec],
    precision: Precision,
    optimizer: OptimizerName,
    lora: LoraSpec | None,
    fields: tuple[Any, ...],
    accumulates: bool,
) -> EngineMemory:
    model, cluster = key.thing, machines.thing
    layout = Layout(**dict(zip(_STATE_FIELDS, fields, strict=True)), gradient_accumulation_steps=1 + accumulates)
    dense = state_bytes(layout, precision, optimizer)
    # Experts are alike on other ranks than the rest, which changes what is sharded over.
    experts = state_bytes(replace(layout, dp=layout.expert_dp, cp=1, tp=1), precision, optimizer)
    buffers, gathered = _buffers(model, cluster, layout, precision)
    # torchao rounds fp32 weights to 8 bits and back again for each product, and keeps neither.
    in_layers = 0.0 if precision == "fp8" else 2.0 * count(model).layer_matrices
    head = 2.0 * model.vocab_size * model.hidden_size
    copies = (0.0, 0.0)
    if uses_autocast(precision, layout) and lora is None:
        # Kept by every matmul for its backward, or, under recompute, by the head alone.
        copies = (in_layers + head, head if layout.recompute == "full" else in_layers + head)
    # FSDP2 takes a model layer by layer from host memory or from disk (kit/engines/torch/engine.py, _birthplace).
    whole_below = 1 if layout.engine == "torch" else 3
    whole_on_device = layout.implementation == "huggingface-sdpa" and layout.zero_stage < whole_below
    parameters = tuple(_parameters(key, layout, stage) for stage in range(layout.pp))
    memory = EngineMemory(
        dense=dense,
        experts=experts,
        parameters=parameters,
        most_step_extra=_most_step_extra(model, layout),
        buffers=buffers,
        gathered=gathered,
        root_is_last=layout.engine == "torch" and layout.zero_stage > 0,
        autocast_copies=copies,
        waiting_gradient=_waiting_gradient(model, layout, precision),
        # Built in fp32 on the device, before it is cast or sharded (kit/engines).
        load=4.0 if whole_on_device else 0.0,
        largest_parameter=_exported(model, layout, optimizer),
    )
    if lora is None:
        return memory
    return _with_adapters(memory, model, lora, layout, precision, MOMENTS[optimizer].matrices)


def _most_step_extra(model: ModelSpec, layout: Layout) -> float:
    """Bytes: DeepSpeed converts a sub group at a time, the torch engine a parameter."""
    if layout.engine == "torch":
        return 4.0 * deepspeed_sizes.largest_parameter(model) / layout.dp
    return 4.0 * ZERO3_SUB_GROUP if layout.zero_stage == 3 else float("inf")


def _waiting_gradient(model: ModelSpec, layout: Layout, precision: Precision) -> float:
    fsdp = layout.engine == "torch" and layout.zero_stage > 0
    if not model.tied_embeddings or fsdp or layout.implementation != "huggingface-sdpa":
        return 0.0
    element = 4.0 if precision == "fp32" or uses_autocast(precision, layout) else 2.0
    return element * model.vocab_size * model.hidden_size


def _exported(model: ModelSpec, layout: Layout, optimizer: OptimizerName) -> int:
    """Elements of the largest tensor that an export gathers, or reads out of 8 bits; replicas in fp32 are copied to the
    host as they are."""
    if layout.implementation == "huggingface-sdpa":
        as_they_are = layout.zero_stage == 0 and optimizer != "adamw-8bit"
        return 0 if as_they_are else deepspeed_sizes.largest_parameter(model)
    return max(deepspeed_sizes.largest_layer_matrix(model), model.vocab_size * model.hidden_size)


def _parameters(key: _ById[ModelSpec], layout: Layout, stage: int) -> RankParameters:
    whole = layout.implementation == "huggingface-sdpa" and layout.tp == 1
    layers = stage_layers(key.thing, layout, stage)
    found = _stage_parameters(key, layers, layout.tp, layout.pp, stage, layout.ep * layout.etp, whole)
    if layout.engine == "torch" and layout.tp > 1:
        # It cuts the layers' matrices alone (kit/engines/torch/tensor_parallel.py).
        counts = count(key.thing)
        found = replace(found, vocabulary=float(counts.embedding + counts.head))
    return found


@lru_cache(maxsize=4096)
def _stage_parameters(
    key: _ById[ModelSpec], layers: tuple[int, ...], tp: int, pp: int, stage: int, expert_ranks: int, whole: bool
) -> RankParameters:
    model = key.thing
    counts = count(model)
    experts = rank_experts(model, pp, expert_ranks, 1, stage, layers)
    if whole:  # what transformers builds, an encoder included
        dense = counts.total - experts
        vocabulary = float(counts.embedding + counts.head)
    else:
        dense = rank_parameters(model, tp, pp, stage, layers)
        tables = int(stage == 0) + int(stage == pp - 1 and (counts.head > 0 or pp > 1))
        vocabulary = float(-(-model.vocab_size // tp) * model.hidden_size * tables)
        vocabulary += counts.positions if stage == 0 else 0
    vectors = counts.sum_over(layers, lambda layer: layer.replicated) + (
        counts.sum_over(layers, lambda layer: layer.split_biases) / tp
    )
    vectors += counts.final_norm if stage == pp - 1 else 0
    return RankParameters(
        dense_matrices=dense - vocabulary - vectors, vectors=vectors, vocabulary=vocabulary, experts=experts
    )


def _buffers(
    model: ModelSpec, cluster: ClusterSpec, layout: Layout, precision: Precision
) -> tuple[float, tuple[float, float, float]]:
    """(what stays, what comes and goes: in the loss, in a layer's backward, at the end of backward): gathered weights,
    and buckets; Megatron's and DDP's hold the gradients."""
    if layout.engine == "megatron" or layout.zero_stage == 0:
        return 0.0, (0.0, 0.0, 0.0)
    element = 4.0 if precision == "fp32" else 2.0
    if layout.engine == "torch":
        return 0.0, _fsdp_buffers(model, layout, element)
    if layout.autocast:
        element = 4.0
    kept = offload.device_buffer_bytes(model, cluster, layout, precision)
    if layout.zero_stage < 3:
        # double buffering: contiguous_gradients with overlap_comm
        buckets = 2 * deepspeed_sizes.reduce_bucket(model, cluster, layout) * element
        return kept, (0.0, buckets, buckets)
    prefetched = deepspeed_sizes.prefetch_bucket(model, cluster, layout) / layout.tp
    live = deepspeed_sizes.live_parameters(model, cluster, layout) / layout.tp + prefetched
    if layout.offload_param == "nvme":
        # Each weight is released after its use (stage3_max_reuse_distance=0 in kit/emit/deepspeed.py).
        live = min(live, deepspeed_sizes.largest_parameter(model) + 2 * prefetched)
    # hpZ keeps weights once more, spread over the ranks of a node, from their first gather of a step until its end.
    second_copy = element * count(model).total / layout.tp / layout.zero_hpz if layout.zero_hpz > 1 else 0.0
    held = live * element + second_copy
    return kept, (held, held, held)


def _fsdp_buffers(model: ModelSpec, layout: Layout, element: float) -> tuple[float, float, float]:
    """FSDP2 (torch/distributed/fsdp/_fully_shard): gathered weights and gradients on their way to be scattered.

    The root (embedding, final norm, head) stays gathered from forward to backward, in stage 2 the layers do too; in
    stage 3 one layer computes while the next is gathered. A unit's gradients exist in the compute dtype and as the
    fp32 input of the reduce-scatter, which the layer before keeps until this one's is made (_fsdp_param_group.py,
    post_backward); the root's are sent last, the head's are there from the beginning. Activations are fullest in the
    MLP's backward, before attention's gradients are made.
    """
    counts = count(model)
    root = counts.total - counts.layers
    layer = counts.layer.total / layout.tp
    kept = counts.layers / layout.tp if layout.zero_stage == 2 else 0.0
    gathered = max(kept, 2 * layer)
    attention = counts.layer.attention / layout.tp
    # Gradients come out of the reduce-scatter in fp32, all of a unit, before they are kept in 16 bits.
    scattered = 4.0 / layout.dp if layout.gradient_dtype == "bf16" else 0.0
    head = counts.head or (counts.embedding - counts.positions)
    return (
        element * (root + kept),
        element * (root + gathered + head + layer - attention) + (4.0 + scattered) * layer,
        (element + 4.0 + scattered) * root,
    )


def _with_adapters(
    memory: EngineMemory, model: ModelSpec, lora: LoraSpec, layout: Layout, precision: Precision, moments: float
) -> EngineMemory:
    """The base frozen in 16 bits or four; adapters and their states in fp32 (16 bytes with AdamW's moments), sharded by
    FSDP2 as all else, otherwise alike on every rank. Adapters are matrices, all of them.

    Frozen weights are read from disk one by one, in the precision in which they stay (kit/engines/adapters.py,
    build_frozen); autocast has nothing to cast of them. Those in four bits are whole again, one at a time, while
    they are multiplied (bitsandbytes/autograd/_functions.py, MatMul4Bit).
    """
    each = adapter_parameters_of(model, lora) / layout.tp / model.num_layers
    adapters = tuple(each * len(stage_layers(model, layout, stage)) for stage in range(layout.pp))
    dense = memory.dense
    if layout.engine == "torch" and precision == "bf16":
        dense = replace(dense, weights=dense.weights / 2)  # no fp32 masters of what is frozen
    owners = layout.dp if layout.engine == "torch" and layout.zero_stage else 1
    load, gathered = 0.0, memory.gathered
    if lora.four_bit:
        one = 2.0 * deepspeed_sizes.largest_layer_matrix(model)
        gathered = (gathered[0] + one, gathered[1] + one, gathered[2])
        if layout.engine == "deepspeed" and layout.zero_stage == 3:
            # Whole weights are quantised, and partitioned afterwards (kit/engines/deepspeed/whole.py).
            in_four_bits = memory.parameters[0].dense_matrices / memory.parameters[0].total
            load = NF4_TWICE_BYTES * in_four_bits + 2.0 * (1 - in_four_bits)
    return replace(
        memory,
        adapters=adapters,
        waiting_gradient=0.0,
        of_adapters=StateBytes(
            weights=4.0 / owners,
            gradients=4.0 / owners,
            gradients_in_forward=4.0 / owners,
            optimizer=moments / owners,
        ),
        dense=dense,
        matrix_weights=NF4_TWICE_BYTES if lora.four_bit else None,
        autocast_copies=(0.0, 0.0),
        gathered=gathered,
        load=load,
    )

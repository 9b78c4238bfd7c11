"""A plan's layout as a described run: the one place where model, job and layout become a ``TrainingSetup``.

A search asks for tens of thousands of layouts of one model. What does not depend on the micro batch is worked out once
and kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from kit.cost import deepspeed_sizes, offload
from kit.cost.params import count, rank_experts, rank_parameters
from kit.cost.pipeline import chunk_layers, stage_layers
from kit.cost.setup import (
    Attention,
    EngineMemory,
    Experts,
    Fp8,
    Generation,
    Kernels,
    Lora,
    RankParameters,
    Shape,
    TrainingSetup,
)
from kit.cost.states import NF4_BYTES, StateBytes, state_bytes
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, LoraSpec, OptimizerName, Precision
from kit.specs.layout import Implementation, Layout
from kit.specs.model import ModelSpec

ZERO3_LIVE_PARAMETERS = 10**9
"""Gathered parameters that DeepSpeed keeps (runtime/zero/config.py: max_live_parameters, max_reuse_distance)."""
ZERO3_SUB_GROUP = 10**9
"""Parameters that a stage-3 step converts at a time (runtime/zero/config.py: sub_group_size)."""

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
    uneven = layout.first_stage_layers is not None or layout.last_stage_layers is not None
    return TrainingSetup(
        shape=_shape(_ById(model)),
        kernels=_KERNELS[layout.implementation],
        attention=_attention(layout.implementation, generation),
        seq_length=job.seq_length,
        micro_batch_size=layout.micro_batch_size,
        micro_batches=layout.gradient_accumulation_steps,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        vp=layout.vp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        sp=layout.sp,
        stage_layers=chunk_layers(model, layout) if uneven else (),
        recompute=layout.recompute,
        weight_bytes=4 if job.precision == "fp32" else 2,
        # Interleaved sends are still read when they would be freed (kit/emit/megatron.py).
        keeps_outputs=layout.pp > 1 and layout.vp > 1,
        gradient_accumulation_fusion=layout.implementation == "transformer-engine",
        fp8=Fp8() if job.precision == "fp8" else None,
        lora=_lora(job.lora),
        gpu_generation=generation,
        element=4 if job.precision == "fp32" else 2,
        autocast=uses_autocast(job.precision, layout),
        exchange=layout.cp_comm_type,
        planned=_engine_memory(
            _ById(model),
            job.precision,
            job.optimizer.name,
            job.lora,
            # The rest of a layout does not change states: micro batches only by their being several.
            tuple(getattr(layout, name) for name in _STATE_FIELDS),
            layout.gradient_accumulation_steps > 1,
        ),
    )


def uses_autocast(precision: Precision, layout: Layout) -> bool:
    """Whether fp32 parameters are cast by every matmul: the torch engine, except where FSDP2 gathers them in bf16."""
    return precision != "fp32" and layout.engine == "torch" and layout.zero_stage == 0


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


def _attention(implementation: Implementation, generation: Generation) -> Attention:
    """Transformer Engine prefers cuDNN's kernel on Hopper and later, flash-attn before (dot_product_attention/utils.py,
    get_attention_backend)."""
    if implementation == "transformer-engine" and generation in ("hopper", "blackwell"):
        return "cudnn"
    return "flash"


def _lora(spec: LoraSpec | None) -> Lora | None:
    return None if spec is None else Lora(rank=spec.rank, targets=_TARGETS[spec.targets], four_bit=spec.four_bit)


class _ById:
    """A model by identity: specs are frozen, but one that holds a dict has no hash of its own."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.model is self.model


@lru_cache(maxsize=64)
def _shape(key: _ById) -> Shape:
    model = key.model
    experts = None
    if model.num_experts:
        experts = Experts(
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            ffn_hidden_size=model.moe_ffn_hidden_size,
            grouped_gemm=False,
        )
    return Shape(
        family=model.family,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        gated_mlp=model.gated_mlp,
        tied_embeddings=model.tied_embeddings,
        norm=model.norm,
        learned_positions=model.max_position_embeddings if model.learned_positions else 0,
        linear_bias=model.linear_bias,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        experts=experts,
        expert_layers=(True,) * model.num_layers if experts else (),
        sliding_window=model.sliding_window,
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
    "recompute",
)


@lru_cache(maxsize=4096)
def _engine_memory(
    key: _ById,
    precision: Precision,
    optimizer: OptimizerName,
    lora: LoraSpec | None,
    fields: tuple[Any, ...],
    accumulates: bool,
) -> EngineMemory:
    model = key.model
    layout = Layout(**dict(zip(_STATE_FIELDS, fields, strict=True)), gradient_accumulation_steps=1 + accumulates)
    dense = state_bytes(layout, precision, optimizer)
    # Experts are alike on other ranks than the rest, which changes what is sharded over.
    experts = state_bytes(replace(layout, dp=layout.expert_dp, cp=1, tp=1), precision, optimizer)
    buffers, gathered = _buffers(model, layout, precision)
    in_layers = 2.0 * model.num_layers * count(model).layer.matrices
    head = 2.0 * model.vocab_size * model.hidden_size
    copies = (0.0, 0.0)
    if uses_autocast(precision, layout):
        # Kept by every matmul for its backward, or, under recompute, by the head alone.
        copies = (in_layers + head, head if layout.recompute == "full" else in_layers + head)
    whole_on_device = layout.implementation == "huggingface-sdpa" and (
        layout.engine == "torch" or layout.zero_stage < 3
    )
    parameters = tuple(_parameters(key, layout, stage) for stage in range(layout.pp))
    memory = EngineMemory(
        dense=dense,
        experts=experts,
        parameters=parameters,
        most_step_extra=4.0 * ZERO3_SUB_GROUP if layout.zero_stage == 3 else float("inf"),
        buffers=buffers,
        gathered=gathered,
        autocast_copies=copies,
        # Built in fp32 on the device, before it is cast or sharded (kit/engines).
        load=4.0 if whole_on_device else 0.0,
        largest_parameter=_exported(model, layout),
    )
    return memory if lora is None else _with_adapters(memory, model, lora, layout)


def _exported(model: ModelSpec, layout: Layout) -> int:
    """Elements of the largest tensor that an export gathers; replicas are copied to the host as they are."""
    if layout.implementation == "huggingface-sdpa":
        return 0 if layout.zero_stage == 0 else deepspeed_sizes.largest_parameter(model)
    return max(deepspeed_sizes.largest_layer_matrix(model), model.vocab_size * model.hidden_size)


def _parameters(key: _ById, layout: Layout, stage: int) -> RankParameters:
    return _stage_parameters(
        key, len(stage_layers(key.model, layout, stage)), layout.tp, layout.pp, stage, layout.ep * layout.etp
    )


@lru_cache(maxsize=4096)
def _stage_parameters(key: _ById, layers: int, tp: int, pp: int, stage: int, expert_ranks: int) -> RankParameters:
    model = key.model
    counts = count(model)
    dense = rank_parameters(model, tp, pp, stage, layers)
    vocabulary = (-(-model.vocab_size // tp) * model.hidden_size) * (
        int(stage == 0) + int(stage == pp - 1 and (counts.head > 0 or pp > 1))
    )
    vocabulary += counts.positions if stage == 0 else 0
    vectors = layers * (counts.layer.split_biases / tp + counts.layer.replicated)
    vectors += counts.final_norm if stage == pp - 1 else 0
    return RankParameters(
        dense_matrices=dense - vocabulary - vectors,
        vectors=vectors,
        vocabulary=vocabulary,
        experts=rank_experts(model, pp, expert_ranks, 1, layers),
    )


def _buffers(model: ModelSpec, layout: Layout, precision: Precision) -> tuple[float, tuple[float, float, float]]:
    """(what stays, what comes and goes: in the loss, in a layer's backward, at the end of backward): gathered weights,
    and buckets; Megatron's and DDP's hold the gradients."""
    if layout.engine == "megatron" or layout.zero_stage == 0:
        return 0.0, (0.0, 0.0, 0.0)
    element = 4.0 if precision == "fp32" else 2.0
    if layout.engine == "torch":
        return 0.0, _fsdp_buffers(model, layout, element)
    kept = offload.device_buffer_bytes(model, layout, precision)
    if layout.zero_stage < 3:
        # double buffering: contiguous_gradients with overlap_comm
        buckets = 2 * deepspeed_sizes.reduce_bucket(model, layout) * element
        return kept, (0.0, buckets, buckets)
    prefetched = deepspeed_sizes.largest_layer_matrix(model) / layout.tp
    live = min(count(model).total / layout.tp, ZERO3_LIVE_PARAMETERS) + prefetched
    if layout.offload_param == "nvme":
        # Each weight is released after its use (stage3_max_reuse_distance=0 in kit/emit/deepspeed.py).
        live = min(live, deepspeed_sizes.largest_parameter(model) + 2 * prefetched)
    return kept, (live * element, live * element, live * element)


def _fsdp_buffers(model: ModelSpec, layout: Layout, element: float) -> tuple[float, float, float]:
    """FSDP2 (torch/distributed/fsdp/_fully_shard): gathered weights and gradients on their way to be scattered.

    The root (embedding, final norm, head) stays gathered from forward to backward, in stage 2 the layers do too; in
    stage 3 one layer computes while the next is gathered. A unit's gradients exist in the compute dtype and as the
    fp32 input of the reduce-scatter, those of the layer before still being sent; the root's are sent last, the head's
    are there from the beginning.
    """
    counts = count(model)
    root = counts.total - counts.layers
    layer = counts.layer.total / layout.tp
    kept = counts.layers / layout.tp if layout.zero_stage == 2 else 0.0
    gathered = max(kept, 2 * layer)
    head = counts.head or (counts.embedding - counts.positions)
    return (
        element * (root + kept),
        element * (root + gathered + head) + (element + 2 * 4.0) * layer,
        (element + 4.0) * root,
    )


def _with_adapters(memory: EngineMemory, model: ModelSpec, lora: LoraSpec, layout: Layout) -> EngineMemory:
    """The base frozen in 16 bits or four; adapters and their states in fp32 (16 bytes), alike on every rank."""
    each = _adapter_parameters(model, lora) / layout.tp
    adapters = tuple(each * len(stage_layers(model, layout, stage)) for stage in range(layout.pp))
    return replace(
        memory,
        adapters=adapters,
        of_adapters=StateBytes(weights=4.0, gradients=4.0, gradients_in_forward=4.0, optimizer=8.0),
        dense=replace(memory.dense, weights=memory.dense.weights),
        matrix_weights=NF4_BYTES if lora.four_bit else None,
    )


def _adapter_parameters(model: ModelSpec, lora: LoraSpec) -> float:
    """Of a layer: r·(inputs + outputs) of every adapted matrix (arXiv 2106.09685, section 4)."""
    h, query = model.hidden_size, model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    sizes = (h + query) + 2 * (h + key_value) + (query + h)
    if lora.targets == "all-linear":
        copies = max(1, model.num_experts)
        sizes += (3 if model.gated_mlp else 2) * (h + model.mlp_width) * copies
    return float(lora.rank * sizes)

"""What an engine holds of a plan beside activations: states, parameters of each stage, buffers, casts.

A search asks for tens of thousands of layouts of one model. What does not depend on the micro batch is worked out once
and kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kit.cost import deepspeed_sizes
from kit.cost.adapter_memory import with_adapters
from kit.cost.gathered import engine_buffers
from kit.cost.params import count
from kit.cost.setup import EngineMemory
from kit.cost.states import MOMENTS, state_bytes
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, OptimizerName, Precision
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

ZERO3_SUB_GROUP = 10**9
"""Parameters that a stage-3 step converts at a time (runtime/zero/config.py: sub_group_size)."""


def engine_memory(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> EngineMemory:
    """Of every rank. Micro batches change it only by their being several."""
    several = min(2, layout.gradient_accumulation_steps)
    alike = replace(layout, micro_batch_size=1, gradient_accumulation_steps=several)
    return _engine_memory(model, cluster, job, alike)


def uses_autocast(precision: Precision, layout: Layout) -> bool:
    """Whether fp32 parameters are cast by every matmul: the torch engine, except where FSDP2 gathers them in bf16, and
    DeepSpeed on request."""
    return layout.autocast or (precision != "fp32" and layout.engine == "torch" and layout.zero_stage == 0)


@lru_cache(maxsize=4096)
def _engine_memory(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> EngineMemory:
    precision, optimizer, lora = job.precision, job.optimizer.name, job.lora
    dense = state_bytes(layout, precision, optimizer)
    # Experts are alike on other ranks than the rest, which changes what is sharded over.
    experts = state_bytes(replace(layout, dp=layout.expert_dp, cp=1, tp=1), precision, optimizer)
    buffers, gathered = engine_buffers(model, cluster, layout, precision)
    # torchao rounds fp32 weights to 8 bits and back again for each product, and keeps neither.
    in_layers = 0.0 if precision == "fp8" else 2.0 * count(model).layer_matrices
    head = 2.0 * model.vocab_size * model.hidden_size
    copies = (0.0, 0.0)
    if uses_autocast(precision, layout) and lora is None:
        # Kept by every matmul for its backward, or, under recompute, by the head alone.
        copies = (in_layers + head, head if layout.recompute == "full" else in_layers + head)
    # FSDP2 takes a model layer by layer from host memory or from disk (kit/engines/torch/engine.py, _birthplace).
    whole_below = 1 if layout.engine == "torch" else 3
    whole_on_device = layout.implementation == "huggingface" and layout.zero_stage < whole_below
    memory = EngineMemory(
        dense=dense,
        experts=experts,
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
    return with_adapters(memory, model, lora, layout, precision, MOMENTS[optimizer].matrices)


def _most_step_extra(model: ModelSpec, layout: Layout) -> float:
    """Bytes: DeepSpeed converts a sub group at a time, the torch engine a parameter."""
    if layout.engine == "torch":
        return 4.0 * deepspeed_sizes.largest_parameter(model) / layout.dp
    return 4.0 * ZERO3_SUB_GROUP if layout.zero_stage == 3 else float("inf")


def _waiting_gradient(model: ModelSpec, layout: Layout, precision: Precision) -> float:
    fsdp = layout.engine == "torch" and layout.zero_stage > 0
    if not model.tied_embeddings or fsdp or layout.implementation != "huggingface":
        return 0.0
    element = 4.0 if precision == "fp32" or uses_autocast(precision, layout) else 2.0
    return element * model.vocab_size * model.hidden_size


def _exported(model: ModelSpec, layout: Layout, optimizer: OptimizerName) -> int:
    """Elements of the largest tensor that an export gathers, or reads out of 8 bits; replicas in fp32 are copied to the
    host as they are."""
    if layout.implementation == "huggingface":
        as_they_are = layout.zero_stage == 0 and optimizer != "adamw-8bit"
        return 0 if as_they_are else deepspeed_sizes.largest_parameter(model)
    return max(deepspeed_sizes.largest_layer_matrix(model), model.vocab_size * model.hidden_size)

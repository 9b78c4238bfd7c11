"""What an engine holds of a plan beside activations: states, parameters of each stage, buffers, casts.

A search asks for tens of thousands of layouts of one model. What does not depend on the micro batch is worked out once
and kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kit.cost.memory import deepspeed_sizes
from kit.cost.memory.buffers import engine_buffers
from kit.cost.memory.rank_states import EngineMemory
from kit.cost.memory.states import NF4_TWICE_BYTES, StateBytes, state_bytes
from kit.cost.model.lora import adapter_parameters_of
from kit.cost.model.optimizers import MOMENTS
from kit.cost.model.params import count
from kit.cost.model.pipeline import stage_layers
from kit.cost.workload import Workload
from kit.specs.job import LoraSpec, OptimizerName
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

_ZERO3_SUB_GROUP = 10**9
"""Parameters that a stage-3 step converts at a time where no size is written (runtime/zero/config.py)."""


def engine_memory(workload: Workload) -> EngineMemory:
    """Memory that the engine takes on every rank. Only whether there are several micro batches matters, so layouts
    share results."""
    return _engine_memory(workload.with_least_micro_batches)


@lru_cache(maxsize=4096)
def _engine_memory(workload: Workload) -> EngineMemory:
    model, job, layout = workload.model, workload.job, workload.layout
    precision, optimizer, lora = job.precision, job.optimizer.name, job.lora
    dense = state_bytes(layout, precision, optimizer)
    # Experts are alike on other ranks than the rest, which changes what is sharded over.
    experts = state_bytes(replace(layout, dp=layout.expert_dp, cp=1, tp=1), precision, optimizer)
    buffers, gathered = engine_buffers(workload)
    # torchao rounds fp32 weights to 8 bits and back again for each product, and keeps neither.
    in_layers = 0.0 if precision == "fp8" else 2.0 * count(model).layer_matrices
    head = 2.0 * model.vocab_size * model.hidden_size
    copies = (0.0, 0.0)
    if workload.autocast and lora is None:
        # Kept by every matmul for its backward, or, under recompute, by the head alone.
        copies = (in_layers + head, head if layout.recompute == "full" else in_layers + head)
    # FSDP2 takes a model layer by layer from host memory or from disk (kit/engines/torch/engine.py, _birthplace).
    whole_below = 1 if layout.engine == "torch" else 3
    whole_on_device = layout.implementation == "huggingface" and layout.zero_stage < whole_below
    memory = EngineMemory(
        dense=dense,
        experts=experts,
        most_step_extra=_most_step_extra(workload),
        buffers=buffers,
        gathered=gathered,
        root_is_last=layout.engine == "torch" and layout.zero_stage > 0,
        autocast_copies=copies,
        waiting_gradient=_waiting_gradient(workload),
        # Built in fp32 on the device, before it is cast or sharded (kit/engines).
        load=4.0 if whole_on_device else 0.0,
        largest_parameter=_exported(model, layout, optimizer),
    )
    if lora is None:
        return memory
    return _with_adapters(memory, workload, lora)


def _most_step_extra(workload: Workload) -> float:
    """Bytes: DeepSpeed converts a sub group at a time, the torch engine a parameter."""
    model, layout = workload.model, workload.layout
    if layout.engine == "torch":
        return 4.0 * deepspeed_sizes.largest_parameter(model) / layout.dp
    sizes = deepspeed_sizes.buffer_sizes(model, workload.cluster, layout) if layout.zero_stage == 3 else {}
    return 4.0 * sizes.get("sub_group_size", _ZERO3_SUB_GROUP) if layout.zero_stage == 3 else float("inf")


def _waiting_gradient(workload: Workload) -> float:
    model, layout = workload.model, workload.layout
    fsdp = layout.engine == "torch" and layout.zero_stage > 0
    if not model.tied_embeddings or fsdp or layout.implementation != "huggingface":
        return 0.0
    element = 4.0 if workload.job.precision == "fp32" or workload.autocast else 2.0
    return element * model.vocab_size * model.hidden_size


def _exported(model: ModelSpec, layout: Layout, optimizer: OptimizerName) -> int:
    """Elements of the largest tensor that an export gathers, or reads out of 8 bits; replicas in fp32 are copied to the
    host as they are."""
    if layout.implementation == "huggingface":
        as_they_are = layout.zero_stage == 0 and optimizer != "adamw-8bit"
        return 0 if as_they_are else deepspeed_sizes.largest_parameter(model)
    return max(deepspeed_sizes.largest_layer_matrix(model), model.vocab_size * model.hidden_size)


def _with_adapters(memory: EngineMemory, workload: Workload, lora: LoraSpec) -> EngineMemory:
    """The base frozen in 16 bits or four; adapters and their states in fp32 (16 bytes with AdamW's moments), sharded by
    FSDP2 as all else, otherwise alike on every rank. Adapters are matrices, all of them.

    Frozen weights are read from disk one by one, in the precision in which they stay
    (kit/engines/huggingface/adapters.py,
    build_frozen); autocast has nothing to cast of them. Those in four bits are whole again, one at a time, while
    they are multiplied (bitsandbytes/autograd/_functions.py, MatMul4Bit).
    """
    model, layout = workload.model, workload.layout
    moments = MOMENTS[workload.job.optimizer.name].matrices
    each = adapter_parameters_of(model, lora) / layout.tp / model.num_layers
    adapters = tuple(each * len(stage_layers(model, layout, stage)) for stage in range(layout.pp))
    dense = memory.dense
    if layout.engine == "torch" and workload.job.precision == "bf16":
        dense = replace(dense, weights=dense.weights / 2)  # no fp32 masters of what is frozen
    owners = layout.dp if layout.engine == "torch" and layout.zero_stage else 1
    load, gathered = 0.0, memory.gathered
    if lora.four_bit:
        one = 2.0 * deepspeed_sizes.largest_layer_matrix(model)
        gathered = (gathered[0] + one, gathered[1] + one, gathered[2])
        if layout.engine == "deepspeed" and layout.zero_stage == 3:
            (parameters,) = workload.setup.parameters
            # Whole weights are quantised, and partitioned afterwards (kit/engines/deepspeed/data_parallel.py).
            in_four_bits = parameters.dense_matrices / parameters.total
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

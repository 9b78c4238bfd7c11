"""LoRA and QLoRA in a plan's memory: a frozen base, and adapters with all their states."""

from __future__ import annotations

from dataclasses import replace

from kit.cost import deepspeed_sizes
from kit.cost.adapters import adapter_parameters_of
from kit.cost.params import stage_parameters
from kit.cost.pipeline import stage_layers
from kit.cost.setup import EngineMemory
from kit.cost.states import NF4_TWICE_BYTES, StateBytes
from kit.specs.job import LoraSpec, Precision
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def with_adapters(
    memory: EngineMemory, model: ModelSpec, lora: LoraSpec, layout: Layout, precision: Precision, moments: float
) -> EngineMemory:
    """The base frozen in 16 bits or four; adapters and their states in fp32 (16 bytes with AdamW's moments), sharded by
    FSDP2 as all else, otherwise alike on every rank. Adapters are matrices, all of them.

    Frozen weights are read from disk one by one, in the precision in which they stay
    (kit/engines/huggingface/adapters.py,
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
            (parameters,) = stage_parameters(model, layout)
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

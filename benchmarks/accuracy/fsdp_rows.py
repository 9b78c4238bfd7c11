"""Memory of FSDP with a transformers model in a published run: kit's own layers, and states sharded per unit.

A unit is a layer. FSDP gathers it for forward and again for backward, together with the next unit. Embedding, final
norm and head are the root unit, which stays gathered (torch/distributed/fsdp, FullyShardedDataParallel, fully_shard).
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.pipelines import Row
from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.rank_params import layer_parameters
from kit.cost.memory.parts import EngineMemory
from kit.cost.memory.states import NF4_TWICE_BYTES, StateBytes
from kit.cost.memory.states_and_buffers import fsdp_buffers

SCALES = NF4_TWICE_BYTES - 0.5
"""Bytes of nf4 scales per weight. Scales are not part of the parameter, so every rank has all of them (bitsandbytes,
nn/modules.py)."""


def with_fsdp(row: Row, workload: PublishedWorkload) -> PublishedWorkload:
    """The workload with the states of FSDP, of DDP at stage 0."""
    layout, model = workload.layout, workload.model
    sharded = layout.zero_stage >= 2
    owners = layout.dp * layout.cp if sharded else 1
    here = 0.0 if workload.parameters_offload else 1 / owners
    width, accumulates = workload.weight_bytes * here, layout.gradient_accumulation_steps > 1
    gradients = workload.main_gradient_bytes * here
    moments = workload.optimizer_bytes * (1 - workload.optimizer_offload)
    # On the stream of FSDP's own reductions, what the allocator reserves for gradients serves nothing else.
    stay = gradients if accumulates or (workload.reserved and sharded) else 0.0
    state = StateBytes(width, moments * here, stay, gradients, gradients, stay)
    matrices, vectors, experts = layer_parameters(workload, bool(model.num_experts))
    (parameters,) = workload.parameters
    root = parameters.vocabulary
    gathered = (0.0, 0.0, 0.0)
    matrix_weights = None
    if workload.lora is not None:
        # Frozen weights are gathered, and have no gradients.
        layer = matrices * (0.5 if workload.lora.four_bit else 2.0) + 2.0 * (vectors + experts)
        in_loss = 2.0 * root + (2 * layer if workload.reserved else 0.0)  # units are gathered on a stream of their own
        gathered = (in_loss, 2.0 * root + 2 * layer, 2.0 * root) if sharded else gathered
        if workload.lora.four_bit:
            matrix_weights = 0.5 * here + SCALES
            one = 2.0 * model.hidden_size * model.mlp_width
            gathered = (gathered[0], gathered[1] + one, gathered[2])
    elif sharded:
        mlp = (3 if model.gated_mlp else 2) * model.hidden_size * model.mlp_width
        gathered = fsdp_buffers(
            root=root,
            head=model.vocab_size * model.hidden_size,
            layer=matrices + vectors + experts,
            attention=matrices - mlp,
            after_forward=parameters.total - root if layout.zero_stage == 2 else 0.0,
            element=2.0,
        )
    lora = workload.lora
    engine = EngineMemory(
        dense=state,
        experts=state,
        matrix_weights=matrix_weights,
        gathered=gathered,
        root_is_last=sharded and lora is None,
        adapters=() if lora is None else (adapter_parameters(workload, lora, 0),),
        of_adapters=state if lora else None,
    )
    return replace(workload, engine=engine)

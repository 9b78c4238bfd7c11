"""Memory of a Megatron rank of a published run: states, and options of Megatron that no plan sets."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.rank_params import largest_layer_parameters
from kit.cost.hardware import MIB, cublas_workspaces
from kit.cost.memory import rank_megatron
from kit.cost.memory.activations_transformer_engine import ELEMENT
from kit.cost.memory.parts import EngineMemory, RankParts
from kit.cost.memory.states import NO_STATES, StateBytes
from kit.cost.model.params import RankParameters

_NOTHING = EngineMemory(dense=NO_STATES, experts=NO_STATES)
STAYS_ON_DEVICE = ("dropout", "router", "mlp", "shared_experts")
"""Fine-grained activation offload sends what modules save to the host, but inputs of dense MLPs and the router."""
GRAPHED = {"residual": 0.5, "layernorm": 0.5} | dict.fromkeys(
    ("attention", "mla_up_proj", "attention_output", "core_attn"), 1.0
)
"""Share of what modules save that graphs of attention hold: of each two norms the first."""
DEFERRED_GRADIENTS = 2
"""Micro batches whose head gradients may wait: ``--wgrad-deferral-limit`` as Megatron-LM's own test of it sets it."""


def rank_parts(workload: PublishedWorkload, stage: int) -> RankParts:
    """Of a rank of one pipeline stage."""
    parts = rank_megatron.rank_parts(workload, _NOTHING, _rank_states(workload, stage), stage)
    gathered = _gathered_bytes(workload, stage)
    present = [bool(kind) for kind, count in enumerate(workload.stages.stage_kinds[stage]) if count]
    whole = max((sum(rank_megatron.layer_terms(workload, kind).values()) for kind in present), default=0.0)
    recomputed = parts.recomputed_layer * workload.recompute_every
    if (workload.activation_offload or workload.offloaded_layers) and workload.layout.recompute != "full":
        recomputed = whole
    if workload.overlapped_layers:  # combined_1f1b: the other layer's tensors exist too
        recomputed += whole
    deferred, loss = _loss_bytes(workload) if stage == workload.layout.pp - 1 else (0.0, 0.0)
    buffers, captured = parts.buffers, 0.0
    if workload.graphed_attention:
        # Graphs are captured in the order of the pipeline, before there are moments (megatron-core, cuda_graphs.py,
        # create_cudagraphs). What they save is in their own pool from then on, which torch counts as free: the measured
        # peak does not rise when moments and losses come.
        states = parts.states
        captured = states.weights + states.gradients_between_steps + states.optimizer - moment_bytes(workload, stage)
        captured += buffers + parts.backward_workspace
        captured += rank_megatron.saved_activations(workload, stage, _captured_bytes)  # type: ignore[arg-type]
    if workload.deterministic:
        buffers += 2 * 32 * MIB - cublas_workspaces(workload.generation)
    if workload.implementation == "megatron-local" and workload.attention == "unfused":
        # megatron-core keeps a buffer of scores (transformer/dot_product_attention.py, ``mpu``).
        heads = workload.model.num_attention_heads / workload.layout.tp
        buffers += ELEMENT * heads * workload.job.seq_length * workload.tokens
    return replace(
        parts,
        buffers=buffers,
        gathered_in_loss=gathered,
        gathered=gathered,
        gathered_at_end=gathered,
        saved_activations=rank_megatron.saved_activations(workload, stage, _chunk_bytes),  # type: ignore[arg-type]
        recomputed_layer=recomputed,
        deferred_gradients=deferred,
        loss=loss,
        load=max(parts.load, captured),
    )


def _chunk_bytes(workload: PublishedWorkload, layers: tuple[int, ...]) -> float:
    """Inputs of recomputed layers, the whole of the others (megatron-core, transformer/transformer_block.py)."""
    layers = tuple(layer for layer in layers if layer >= workload.offloaded_layers)
    if workload.layout.recompute != "full":
        return sum(_layer_bytes(workload, workload.model.has_experts(layer)) for layer in layers)
    number = len(layers) if workload.recompute_layers is None else min(workload.recompute_layers, len(layers))
    others = (workload.model.has_experts(layer) for layer in layers[number:])
    whole = sum(sum(rank_megatron.layer_terms(workload, kind).values()) for kind in others)
    return -(-number // workload.recompute_every) * rank_megatron.layer_input(workload) + whole


def _captured_bytes(workload: PublishedWorkload, layers: tuple[int, ...]) -> float:
    terms = rank_megatron.layer_terms(workload, False)
    return len(layers) * sum(share * terms.get(name, 0.0) for name, share in GRAPHED.items())


def _layer_bytes(workload: PublishedWorkload, has_experts: bool) -> float:
    terms = rank_megatron.saved_terms(workload, has_experts)
    if workload.graphed_attention:
        terms = {name: size * (1 - GRAPHED.get(name, 0.0)) for name, size in terms.items()}
    return sum(size for name, size in terms.items() if not workload.activation_offload or name in STAYS_ON_DEVICE)


def _loss_bytes(workload: PublishedWorkload) -> tuple[float, float]:
    """(kept since the losses of multi-token prediction, at the fullest moment of the last loss)."""
    if not workload.defer_embedding_gradient:
        return rank_megatron.loss_parts(workload)
    # Logits' gradients and the head's inputs wait for the end (tensor_parallel/layers.py, wgrad_deferral_limit).
    entries = rank_megatron.logits(workload)
    waiting = min(workload.layout.gradient_accumulation_steps - 1, DEFERRED_GRADIENTS)
    return waiting * (2 * entries + ELEMENT * workload.model.hidden_size * workload.tokens), 6 * entries


def _rank_states(workload: PublishedWorkload, stage: int) -> StateBytes:
    weights, gradients, optimizer = _state_bytes(workload, stage)
    copies = 0.0
    if workload.main_gradient_bytes != 4 and workload.optimizer_bytes >= 12:
        # fp32 copies of 16-bit gradients, from the optimizer step until the next begins; of a rank's own shard under
        # the distributed optimizer (optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads). A precision-aware
        # optimizer makes none.
        dense, experts = owners(workload)
        parameters = workload.parameters[stage]
        copies = 4.0 * (parameters.dense / dense + parameters.experts / experts)
    return StateBytes(
        weights=weights,
        optimizer=optimizer,
        gradients_in_forward=gradients,
        gradients=gradients,
        gradients_in_step=gradients,
        gradients_between_steps=gradients + copies,
        extra_in_step=copies,
    )


def moment_bytes(workload: PublishedWorkload, stage: int) -> float:
    """Part of the optimizer that does not exist before the first step."""
    moments = workload.optimizer_bytes - 4 if workload.weight_bytes == 2 else workload.optimizer_bytes
    return _state_bytes(workload, stage)[2] * moments / workload.optimizer_bytes


def _state_bytes(workload: PublishedWorkload, stage: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer of a rank: 6 + 12/d bytes a parameter with the distributed optimizer, 18 without
    (megatron-core, docs of dist_optimizer).

    Dense parameters have d = dp·cp owners, experts dp·cp·tp/(ep·etp); optimizer instances divide both.
    """
    parameters, layout = workload.parameters[stage], workload.layout
    dense_owners, expert_owners = owners(workload)
    if workload.lora is not None:
        # A frozen base has neither gradients nor optimizer state.
        trained = adapter_parameters(workload, workload.lora, stage)
        weights = workload.weight_bytes * (parameters.total + trained)
        return weights, workload.main_gradient_bytes * trained, workload.optimizer_bytes * trained / dense_owners
    held = parameters.total
    if layout.zero_stage == 3:
        held = parameters.dense / dense_owners + parameters.experts / expert_owners
    optimizer = _optimizer(workload, parameters, dense_owners, expert_owners) * (1 - workload.optimizer_offload)
    return workload.weight_bytes * held, workload.main_gradient_bytes * held, optimizer


def owners(workload: PublishedWorkload) -> tuple[float, float]:
    """Ranks that share out the optimizer of dense parameters, and of experts."""
    layout, instances = workload.layout, workload.optimizer_instances
    if layout.zero_stage not in (1, 3):
        return 1.0, 1.0
    expert_owners = layout.dp * layout.cp * layout.tp / (layout.ep * layout.etp) / instances
    return layout.dp * layout.cp / instances, max(expert_owners, 1.0)


def _optimizer(
    workload: PublishedWorkload, parameters: RankParameters, dense_owners: float, expert_owners: float
) -> float:
    rest = workload.optimizer_bytes
    per_matrix = rest if workload.matrix_optimizer_bytes is None else workload.matrix_optimizer_bytes
    dense = per_matrix * parameters.dense_matrices + rest * (parameters.vectors + parameters.vocabulary)
    return dense / dense_owners + per_matrix * parameters.experts / expert_owners


def _gathered_bytes(workload: PublishedWorkload, stage: int) -> float:
    """Megatron-FSDP: weights and gradients of a layer and of the vocabulary, gathered (distributed/fsdp)."""
    if workload.layout.zero_stage != 3:
        return 0.0
    table = workload.model.vocab_size / workload.layout.tp * workload.model.hidden_size
    largest = max(largest_layer_parameters(workload, stage), table)
    return (workload.weight_bytes + workload.main_gradient_bytes) * 2 * largest

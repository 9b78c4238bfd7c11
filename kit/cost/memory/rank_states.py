"""Weights, gradients and optimizer state of one rank, in bytes, at each moment of a step."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.memory.states import StateBytes
from kit.cost.model.params import RankParameters


@dataclass(frozen=True)
class RankStates:
    """Bytes."""

    weights: float
    optimizer: float
    """Masters where they are a copy, and moments."""
    gradients_in_forward: float
    gradients: float
    """At the end of backward, where they are fullest."""
    gradients_in_step: float
    gradients_between_steps: float
    extra_in_step: float
    moments: float
    """Part of ``optimizer`` that does not exist before the first step."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """What a planned engine holds beside activations, where that follows from model and layout alone.

    Bytes per parameter for dense parameters and experts, and absolute bytes of buffers.
    """

    dense: StateBytes
    experts: StateBytes
    adapters: tuple[float, ...] = ()
    """LoRA's parameters on each stage; then everything else is frozen. Empty without."""
    of_adapters: StateBytes | None = None
    matrix_weights: float | None = None
    """Bytes of an element of the layers' matrices where they are quantised; null: as all weights."""
    most_step_extra: float = float("inf")
    """Bytes that a step converts at a time."""
    buffers: float = 0.0
    """Buckets that stay."""
    gathered: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Weights, gradients and buckets that come and go: in the loss, in a layer's backward, at the end of backward."""
    root_is_last: bool = False
    """Whether what is there at the end of backward comes when the last layer's own tensors have gone (FSDP2's root)."""
    autocast_copies: tuple[float, float] = (0.0, 0.0)
    """16-bit casts of fp32 weights that exist: when forward has ended, while the loss is computed and after."""
    waiting_gradient: float = 0.0
    """Gradient of a tied head. autograd keeps it until the embedding's exists, and hands over their sum. (FSDP2's is
    part of ``gathered``.)"""
    load: float = 0.0
    """Bytes per parameter while the model is built; 0: no more than what stays."""
    largest_parameter: int = 0
    """Elements; what an export gathers at a time."""


def rank_states(engine: EngineMemory, parameters: RankParameters, stage: int) -> RankStates:
    """Weights, gradients and optimizer state of a rank of one pipeline stage."""
    if engine.of_adapters is not None:
        return _adapted(engine, engine.of_adapters, parameters, engine.adapters[stage])
    dense, experts, of_dense, of_experts = parameters.dense, parameters.experts, engine.dense, engine.experts

    def held(name: str, default: float = 0.0) -> float:
        return _value(of_dense, name, default) * dense + _value(of_experts, name, default) * experts

    optimizer = of_dense.optimizer * dense + of_experts.optimizer * experts
    if of_dense.optimizer_of_matrices is not None:
        rest = parameters.vectors + parameters.vocabulary
        matrices = of_experts.optimizer_of_matrices or 0.0
        optimizer = of_dense.optimizer * rest + of_dense.optimizer_of_matrices * parameters.dense_matrices
        optimizer += matrices * experts
    if of_dense.optimizer_of_vectors is not None:
        optimizer += (of_dense.optimizer_of_vectors - of_dense.optimizer) * parameters.vectors
    gradients = of_dense.gradients * dense + of_experts.gradients * experts
    in_forward = of_dense.gradients_in_forward * dense + of_experts.gradients_in_forward * experts
    extra = of_dense.extra_in_step * dense + of_experts.extra_in_step * experts
    in_step = gradients if of_dense.gradients_in_step is None else held("gradients_in_step")
    between = in_forward if of_dense.gradients_between_steps is None else held("gradients_between_steps")
    return RankStates(
        weights=of_dense.weights * dense + of_experts.weights * experts,
        optimizer=optimizer,
        gradients_in_forward=in_forward,
        gradients=gradients,
        gradients_in_step=in_step,
        gradients_between_steps=between,
        extra_in_step=min(extra, engine.most_step_extra),
        moments=0.0,
    )


def _value(state: StateBytes, name: str, default: float) -> float:
    found = getattr(state, name)
    return default if found is None else float(found)


def _adapted(engine: EngineMemory, own: StateBytes, parameters: RankParameters, adapters: float) -> RankStates:
    """A frozen base has neither gradients nor optimizer state."""
    # Experts are one tensor for all of them, no linear layer, and are not quantised
    # (kit/engines/huggingface/adapters.py).
    matrices = parameters.dense_matrices
    rest = parameters.total - matrices
    per_matrix = engine.dense.weights if engine.matrix_weights is None else engine.matrix_weights
    in_step = own.gradients if own.gradients_in_step is None else own.gradients_in_step
    between = own.gradients_in_forward if own.gradients_between_steps is None else own.gradients_between_steps
    return RankStates(
        weights=per_matrix * matrices + engine.dense.weights * rest + own.weights * adapters,
        optimizer=own.optimizer * adapters,
        gradients_in_forward=own.gradients_in_forward * adapters,
        gradients=own.gradients * adapters,
        gradients_in_step=in_step * adapters,
        gradients_between_steps=between * adapters,
        extra_in_step=own.extra_in_step * adapters,
        moments=0.0,
    )

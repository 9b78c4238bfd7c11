"""Measured memory of a probe, and the cost model's prediction of it: states and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.cost.memory.peak import parts_of
from kit.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """Bytes of one rank."""

    weights: float
    gradients: float
    """Gradients at the end of backward."""
    optimizer: float
    """Master weights, if they are a copy, and moments."""
    activations: float
    """Peak of all other tensors in forward and backward: saved activations, logits and loss, gathered weights."""

    kept: float = 0.0
    """Largest such amount at the end of a forward pass; its slope over layers is what one layer saves."""

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """One stage of a plan."""

    stage: int
    measured: MemorySnapshot
    predicted: MemorySnapshot
    with_states: bool
    """Whether states were measured; False if the engine's states cannot be built from fake tensors."""
    layers_traced: tuple[int, ...]
    """Layers per chunk of the traced models, from which the stage's depth is extrapolated."""
    seconds: float

    @property
    def states_error(self) -> float | None:
        """Predicted / measured states − 1; None if states were not measured."""
        return self.predicted.states / self.measured.states - 1 if self.with_states else None

    @property
    def activations_error(self) -> float:
        """Predicted / measured activations − 1."""
        return self.predicted.activations / self.measured.activations - 1

    def as_json(self) -> dict[str, Any]:
        """JSON-able values, bytes."""
        return {
            "stage": self.stage,
            "measured": vars(self.measured),
            "predicted": vars(self.predicted),
            "states_error": self.states_error,
            "activations_error": self.activations_error,
            "layers_traced": list(self.layers_traced),
            "seconds": self.seconds,
        }


def predicted(plan: Plan, stage: int) -> MemorySnapshot:
    """Predicted bytes of the tensors that a probe can see: without library workspaces, communicators and DeepSpeed's
    buckets."""
    parts = parts_of(plan.workload, stage)
    states = parts.states
    in_loss, in_backward, at_end = (
        (parts.gathered_in_loss, parts.gathered, parts.gathered_at_end)
        if plan.layout.engine == "torch"
        else (0.0, 0.0, 0.0)
    )
    layer = parts.recomputed_layer + parts.backward_workspace
    cast_buffers, cast_logits = parts.casts_in_forward
    moments = (
        in_loss + parts.saved_activations + parts.buffers_in_loss + parts.deferred_gradients + parts.loss,
        in_backward + parts.saved_activations - parts.freed_before_layers + parts.buffers_in_loss + layer,
        in_loss + parts.saved_activations + cast_buffers + cast_logits,
        at_end + parts.after_backward + layer,
    )
    return MemorySnapshot(
        weights=states.weights, gradients=states.gradients, optimizer=states.optimizer, activations=max(moments)
    )

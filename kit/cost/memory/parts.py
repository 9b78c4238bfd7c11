"""The parts of a rank's memory: what the engine has, and all that the rank has, layers and loss included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kit.cost.memory.states import StateBytes


class EngineMemory(NamedTuple):
    """Memory of an engine without activations: bytes per parameter of dense parameters and experts, and bytes of
    buffers."""

    dense: StateBytes
    experts: StateBytes
    adapters: tuple[float, ...] = ()
    """LoRA parameters on a rank of each stage; all other parameters are then frozen. Empty without LoRA."""
    of_adapters: StateBytes | None = None
    matrix_weights: float | None = None
    """Bytes per element of quantised layer matrices; None: the same as other weights."""
    quantised_experts: float = 0.0
    """Share of the experts' parameters that are quantised as these matrices are: all but their biases, or none."""
    most_step_extra: float = float("inf")
    """Most bytes that the optimizer step converts at a time."""
    buffers: float = 0.0
    """Bytes of permanent buckets."""
    gathered: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Bytes of temporary weights, gradients and buckets: in the loss, in a layer's backward, at the end of backward."""
    root_is_last: bool = False
    """Whether the third value of ``gathered`` is reached after the last layer's tensors are freed (FSDP2's root)."""
    autocast_copies: tuple[float, float] = (0.0, 0.0)
    """Bytes of 16-bit casts of fp32 weights: at the end of forward; in the loss and later."""
    deferred_head_gradient: float = 0.0
    """Bytes of a tied head's gradient, which autograd keeps until it can add the embedding's. 0 for FSDP2, where it is
    part of ``gathered``."""
    load: float = 0.0
    """Bytes while the model is built; 0: no more than afterwards."""
    save: float = 0.0
    """Bytes that an export gathers beside the states."""


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Bytes of one rank by part; ``peak`` adds up those that exist at the same time."""

    states: StateBytes
    buffers: float
    """Workspaces and permanent buckets."""
    gathered_in_loss: float = 0.0
    """Gathered weights while the loss is computed."""
    gathered: float = 0.0
    """Gathered weights, unsharded gradients and buckets during a layer's backward."""
    gathered_at_end: float = 0.0
    """Gathered weights, unsharded gradients and buckets after the last layer's backward."""
    buffers_in_loss: float = 0.0
    """Additional buffers, from the loss to the end of the first layer's backward."""
    casts_in_forward: tuple[float, float] = (0.0, 0.0)
    """(buffers, logits) at the end of forward, if there are more autocast copies then than in the loss."""
    saved_activations: float
    """Activations saved for backward, of all micro batches in flight."""
    freed_before_layers: float = 0.0
    """Part of these that backward frees before it recomputes the last layer: the final norm's."""
    recomputed_layer: float = 0.0
    """Activations of one layer more in backward: the layer itself, recomputed or fetched from the host, or another one
    whose forward runs beside it."""
    backward_workspace: float
    """Gradients of a layer's intermediate tensors, or what its forward holds beside what it saves."""
    deferred_gradients: float = 0.0
    """Gradients of earlier losses (multi-token prediction), and of deferred weight-gradient GEMMs."""
    loss: float = 0.0
    """Peak of head and loss."""
    generation: float = 0.0
    """Keys, values, logits and gathered weights while completions are generated (GRPO)."""
    after_backward: float = 0.0
    """Gradients at the end of backward that are not yet accumulated."""
    load: float = 0.0
    """All memory while the model is built, where it may be more than between steps."""
    save: float = 0.0
    """Tensors that an export gathers."""

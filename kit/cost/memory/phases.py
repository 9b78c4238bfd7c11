"""Memory of a rank at each moment of a run: adds up the parts (``RankParts``) that exist at the same time.

The peak may be at different moments: activations are fullest when the loss is computed, gradients at the end of
backward, and the optimizer step may need copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kit.cost.memory.states import StateBytes

Moment = dict[str, float]
"""Component → bytes."""

MIB = 2.0**20


def cublas_workspaces(generation: str) -> float:
    """Bytes of cuBLAS's two workspaces, one for the forward thread and one for autograd's: 32 MiB each on Hopper and
    later, otherwise 8.1 MiB (pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return 2 * (32 * MIB if generation in LARGE_WORKSPACES else 8.125 * MIB)


LARGE_WORKSPACES = ("hopper", "blackwell")


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
    largest_parameter: int = 0
    """Elements of the largest parameter, which an export gathers."""


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Bytes of one rank by part; ``phases_of`` adds them up."""

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
    """Gradients of a layer's intermediate tensors."""
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


def export_bytes(tp: int) -> float:
    """Bytes per element of an exported parameter: an export gathers fp32 shards and, if ``tp`` > 1, concatenates them
    (kit/engines/megatron/resharding/huggingface.py)."""
    return 8.0 if tp > 1 else 4.0


def peak_bytes(parts: RankParts) -> float:
    """Peak bytes: the sum of the fullest of ``phases_of(parts)``, computed without its components."""
    states = parts.states
    in_forward = states.gradients_in_forward + parts.saved_activations
    layer = parts.recomputed_layer + parts.backward_workspace
    moments = (
        parts.gathered_in_loss + parts.buffers_in_loss + in_forward + parts.deferred_gradients + parts.loss,
        parts.gathered + parts.buffers_in_loss + in_forward - parts.freed_before_layers + layer,
        parts.gathered_at_end + states.gradients + parts.after_backward + layer,
        states.gradients_in_step + states.extra_in_step,
        states.gradients_between_steps + parts.save,
        parts.gathered_in_loss + sum(parts.casts_in_forward) + in_forward,
        states.gradients_between_steps + parts.generation,
    )
    peak = states.weights + states.optimizer + parts.buffers + max(moments)
    return max(peak, parts.load)


def phases_of(parts: RankParts) -> dict[str, Moment]:
    """The peak moment of load, forward, backward, step and save."""
    states, buffers = parts.states, parts.buffers
    constant = {
        "weights": states.weights,
        "gradients": states.gradients_in_forward,
        "optimizer": states.optimizer,
        "activations": 0.0,
        "logits": 0.0,
        "buffers": buffers,
    }
    layer = parts.recomputed_layer + parts.backward_workspace
    in_forward = buffers + parts.gathered_in_loss
    in_loss = in_forward + parts.buffers_in_loss
    in_backward = buffers + parts.gathered + parts.buffers_in_loss
    at_end = buffers + parts.gathered_at_end
    cast_buffers, cast_logits = parts.casts_in_forward
    loss = constant | {
        "activations": parts.saved_activations,
        "logits": parts.deferred_gradients + parts.loss,
        "buffers": in_loss,
    }
    casts = constant | {
        "activations": parts.saved_activations,
        "logits": cast_logits,
        "buffers": in_forward + cast_buffers,
    }
    saved_by_layers = parts.saved_activations - parts.freed_before_layers
    first_back = constant | {"activations": saved_by_layers + layer, "buffers": in_backward}
    ended = constant | {"activations": layer, "gradients": states.gradients + parts.after_backward, "buffers": at_end}
    step = constant | {"gradients": states.gradients_in_step + states.extra_in_step}
    between = constant | {"gradients": states.gradients_between_steps}
    return {
        "load": fullest(between, dict.fromkeys(constant, 0.0) | {"weights": parts.load}),
        "forward": fullest(loss, casts, between | {"activations": parts.generation}),
        "backward": fullest(first_back, ended),
        "step": step,
        "save": between | {"buffers": buffers + parts.save},
    }


def fullest(*moments: Moment) -> Moment:
    """The moment with the most memory."""
    return max(moments, key=lambda parts: sum(parts.values()))

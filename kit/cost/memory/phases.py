"""Memory of a rank at each moment of a run, for plans and for described runs alike.

Each implementation counts its parts (``RankParts``); here they are added up, moment by moment. The peak moves over a
step: activations are fullest when the loss is computed, gradients when backward ends, and the optimizer may
need copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kit.cost.memory.states import StateBytes

Moment = dict[str, float]
"""Component → bytes."""

MIB = 2.0**20

PHASES = ("load", "forward", "backward", "step", "save")


def cublas_workspaces(generation: str) -> float:
    """Bytes of two, of the thread that runs forward and of autograd's: 32 MiB on Hopper and later, else 8.1 (pytorch,
    aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return 2 * (32 * MIB if generation in LARGE_WORKSPACES else 8.125 * MIB)


LARGE_WORKSPACES = ("hopper", "blackwell")


class RankStates(NamedTuple):
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


class EngineMemory(NamedTuple):
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
    deferred_head_gradient: float = 0.0
    """Gradient of a tied head. autograd keeps it until the embedding's exists, and hands over their sum. (FSDP2's is
    part of ``gathered``.)"""
    load: float = 0.0
    """Bytes per parameter while the model is built; 0: no more than what stays."""
    largest_parameter: int = 0
    """Elements; what an export gathers at a time."""


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Bytes of one rank, before they are added up."""

    states: RankStates
    buffers: float
    """Workspaces and buckets, which stay from the first step on."""
    gathered_in_loss: float = 0.0
    """Weights that other ranks own too: when forward has ended and the loss is computed."""
    gathered: float = 0.0
    """Weights, gradients and buckets while a layer's backward runs."""
    gathered_at_end: float = 0.0
    """Weights, gradients and buckets when the last layer's backward has run."""
    buffers_in_loss: float = 0.0
    """Additional buffers, from the loss until the first layer's backward has run."""
    casts_in_forward: tuple[float, float] = (0.0, 0.0)
    """(buffers, logits) when forward has ended, where more is cast then than while the loss is computed."""
    saved_activations: float
    """Saved for backward by all micro batches in flight."""
    recomputed_layer: float = 0.0
    """Activations of a layer that is recomputed, or fetched from the host, for its backward."""
    backward_workspace: float
    """Gradients of a layer's intermediate results."""
    deferred_gradients: float = 0.0
    """Gradients of losses before the last (multi-token prediction), and those whose GEMMs are deferred."""
    loss: float = 0.0
    """Fullest moment of head and loss."""
    after_backward: float = 0.0
    """Gradients beside the accumulated ones when backward ends."""
    load: float | None = None
    """Weights and all else while the model is built; null: what stays."""
    save: float = 0.0
    """What an export gathers."""


class RankMemory(NamedTuple):
    """Bytes by component."""

    phases: dict[str, Moment]
    """The fullest moment of each of ``PHASES``."""
    end_of_step: Moment
    first_step_peak: Moment
    """Peak of a run's first step: moments do not exist until the optimizer has stepped."""

    @property
    def peak(self) -> Moment:
        """The fullest moment of training."""
        return max(self.phases.values(), key=lambda parts: sum(parts.values()))


def export_bytes(tp: int) -> float:
    """Bytes an element of the largest parameter while it is exported: an export gathers a parameter's shards in fp32,
    and joins them (kit/engines/megatron/resharding/huggingface.py)."""
    return 8.0 if tp > 1 else 4.0


def peak_bytes(parts: RankParts) -> float:
    """Sum of the fullest moment: what ``rank_memory`` says, without the components."""
    states = parts.states
    in_forward = states.gradients_in_forward + parts.saved_activations
    layer = parts.recomputed_layer + parts.backward_workspace
    moments = (
        parts.gathered_in_loss + parts.buffers_in_loss + in_forward + parts.deferred_gradients + parts.loss,
        parts.gathered + parts.buffers_in_loss + in_forward + layer,
        parts.gathered_at_end + states.gradients + parts.after_backward + layer,
        states.gradients_in_step + states.extra_in_step,
        states.gradients_between_steps + parts.save,
        parts.gathered_in_loss + sum(parts.casts_in_forward) + in_forward,
    )
    peak = states.weights + states.optimizer + parts.buffers + max(moments)
    return peak if parts.load is None else max(peak, parts.load)


def rank_memory(parts: RankParts) -> RankMemory:
    """Adds up the components of every moment."""
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
    first_back = constant | {"activations": parts.saved_activations + layer, "buffers": in_backward}
    ended = constant | {"activations": layer, "gradients": states.gradients + parts.after_backward, "buffers": at_end}
    step = constant | {"gradients": states.gradients_in_step + states.extra_in_step}
    between = constant | {"gradients": states.gradients_between_steps}
    built = between if parts.load is None else dict.fromkeys(constant, 0.0) | {"weights": parts.load}
    phases = {
        "load": built,
        "forward": _fullest(loss, casts),
        "backward": _fullest(first_back, ended),
        "step": step,
        "save": between | {"buffers": buffers + parts.save},
    }
    before_step = _fullest(phases["forward"], phases["backward"])
    before_step = before_step | {"optimizer": states.optimizer - states.moments}
    return RankMemory(phases=phases, end_of_step=between, first_step_peak=_fullest(before_step, between))


def _fullest(*moments: Moment) -> Moment:
    return max(moments, key=lambda parts: sum(parts.values()))

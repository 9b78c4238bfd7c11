"""Memory of a rank at each moment of a run, for plans and for described runs alike.

Each implementation says what it keeps (``RankParts``); here it is added up, moment by moment. The peak moves over a
step: activations are fullest when the loss is computed, gradients when backward ends, and the optimizer may
need copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.memory.rank_states import RankStates

Moment = dict[str, float]
"""Component → bytes."""

MIB = 2.0**20

PHASES = ("load", "forward", "backward", "step", "save")


def cublas_workspaces(generation: str, deterministic: bool = False) -> float:
    """Bytes of two, of the thread that runs forward and of autograd's: 32 MiB on Hopper and later and where determinism
    asks for ``:4096:8``, else 8.1 (pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return 2 * (32 * MIB if generation in LARGE_WORKSPACES or deterministic else 8.125 * MIB)


LARGE_WORKSPACES = ("hopper", "blackwell")


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
    kept: float
    """Saved for backward by all micro batches in flight."""
    again: float = 0.0
    """A layer that is computed again, or fetched from the host, for its backward."""
    working: float
    """Gradients of a layer's intermediate results."""
    waiting: float = 0.0
    """Deferred gradients, and those of losses before the last (multi-token prediction)."""
    loss: float = 0.0
    """Fullest moment of head and loss."""
    after_backward: float = 0.0
    """Gradients beside the accumulated ones when backward ends."""
    load: float | None = None
    """Weights and all else while the model is built; null: what stays."""
    save: float = 0.0
    """What an export gathers."""


@dataclass(frozen=True)
class RankMemory:
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


def peak_bytes(parts: RankParts) -> float:
    """Sum of the fullest moment: what ``rank_memory`` says, without the components."""
    states = parts.states
    forward, backward, ended, step, save, casts = _dynamic(parts)
    constant = states.weights + states.optimizer + parts.buffers
    peak = constant + max(forward, backward, ended, step, save, casts)
    return peak if parts.load is None else max(peak, parts.load)


def _dynamic(parts: RankParts) -> tuple[float, float, float, float, float, float]:
    states, kept = parts.states, parts.kept
    held = parts.buffers_in_loss + states.gradients_in_forward + kept
    loss = parts.gathered_in_loss + held
    layer = parts.again + parts.working
    cast_buffers, cast_logits = parts.casts_in_forward
    return (
        loss + parts.waiting + parts.loss,
        parts.gathered + held + layer,
        parts.gathered_at_end + states.gradients + parts.after_backward + layer,
        states.gradients_in_step + states.extra_in_step,
        states.gradients_between_steps + parts.save,
        parts.gathered_in_loss + cast_buffers + cast_logits + states.gradients_in_forward + kept,
    )


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
    layer = parts.again + parts.working
    in_forward = buffers + parts.gathered_in_loss
    in_loss = in_forward + parts.buffers_in_loss
    in_backward = buffers + parts.gathered + parts.buffers_in_loss
    at_end = buffers + parts.gathered_at_end
    cast_buffers, cast_logits = parts.casts_in_forward
    loss = constant | {"activations": parts.kept, "logits": parts.waiting + parts.loss, "buffers": in_loss}
    casts = constant | {"activations": parts.kept, "logits": cast_logits, "buffers": in_forward + cast_buffers}
    first_back = constant | {"activations": parts.kept + layer, "buffers": in_backward}
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

"""Compares a step with the steps before it, and decides about a spike.

A spike is more than ``sigmas`` standard deviations above the median of the last ``window_steps`` steps. The deviation
is 1.4826 times the median absolute deviation (Rousseeuw & Croux 1993, "Alternatives to the median absolute deviation",
equation 1.1). A spike in the window changes neither much. OLMo's trainer skips steps in the same way, but with mean and
standard deviation (olmo_core/optim/skip_step_optimizer.py, six sigmas over 128 steps).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from kit.specs.run import SpikeAction, StabilitySpec

_Action = Literal["none", "warn", "discard", "rewind", "stop"]
APPLIES_STEP = ("none", "warn")
"""Actions that allow the optimizer step."""
_LEAST_DEVIATION = 0.01
"""Smallest deviation, as a fraction of the median. Otherwise, if all values in the window are nearly equal (a loss that
has converged), any change would be a spike."""


@dataclass(frozen=True)
class StepDecision:
    """Decision about one value of one step. False as a bool only if the action is ``none``."""

    action: _Action
    kind: Literal["", "loss spike", "gradient spike", "not finite"] = ""
    why: str = ""

    def __bool__(self) -> bool:
        return self.action != "none"


OK = StepDecision("none")


class SpikeDetector:
    """Compares every step's loss and gradient norm with the steps before. Both values are equal on all ranks."""

    def __init__(self, spec: StabilitySpec) -> None:
        self._spec = spec
        self.reset(())

    def record(self, loss: float, grad_norm: float | None) -> None:
        """Add the values of a step that changed the weights."""
        self._losses.append(loss)
        if grad_norm is not None:
            self._norms.append(grad_norm)

    def reset(self, kept: Iterable[tuple[float, float | None]]) -> None:
        """Replace the window by (loss, gradient norm) of the steps in ``kept``, after a resume or a rewind."""
        self._losses: deque[float] = deque(maxlen=self._spec.window_steps)
        self._norms: deque[float] = deque(maxlen=self._spec.window_steps)
        for loss, norm in kept:
            self.record(loss, norm)

    def check_loss(self, loss: float) -> StepDecision:
        """Decide about a loss, before the optimizer step."""
        return self._check("loss", loss, self._losses, self._spec.loss_spike)

    def check_norm(self, norm: float) -> StepDecision:
        """Decide about a gradient norm, before clipping."""
        return self._check("gradient norm", norm, self._norms, self._spec.gradient_spike)

    def _check(self, name: str, value: float, window: Collection[float], action: SpikeAction) -> StepDecision:
        if not math.isfinite(value):
            return StepDecision(self._spec.not_finite, "not finite", f"{name} is {value}")
        if action == "off" or len(window) < self._spec.window_steps // 4:
            return OK
        median = statistics.median(window)
        distance = statistics.median(abs(earlier - median) for earlier in window)
        deviation = max(1.4826 * distance, _LEAST_DEVIATION * abs(median))
        limit = median + self._spec.sigmas * deviation
        if value <= limit:
            return OK
        why = f"{name} {value:.4g} is above {limit:.4g} (median {median:.4g} of {len(window)} steps)"
        return StepDecision(action, "loss spike" if name == "loss" else "gradient spike", why)

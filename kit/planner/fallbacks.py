"""Choices that the search makes by itself only where nothing else fits, before it says no.

A last resort is a set of pins that the planner adds to the user's own. They stand in groups, the cheapest first: what
costs time, then what costs accuracy, the less of it first. The user's pins forbid what contradicts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kit.planner.request import Request
from kit.specs.layout import DEFAULTS, Pins


@dataclass(frozen=True, eq=False)
class Fallback:
    """Pins that the planner adds, and what they cost."""

    what: str
    price: str
    """What it costs beside the predicted step time: sentences without the last full stop."""
    pins: Mapping[str, Any]
    """Last the field whose default forbids it."""
    steps: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field of a layout → its values, from the most memory to the least: a layout gets the first that fits."""
    pretrains: bool = False
    """Whether nothing trains it but Megatron-LM's pretrain_gpt.py, which has no other objective."""

    def added_to(self, request: Request) -> Request | None:
        """The request with these pins too, and the first of each open step; None if the user's pins forbid them, or
        have them already."""
        contradicted = any(getattr(request.pins, name) not in (None, value) for name, value in self.pins.items())
        first = {name: values[0] for name, values in self.open_steps(request).items()}
        pinned = not first and all(getattr(request.pins, name) == value for name, value in self.pins.items())
        if contradicted or pinned or (self.pretrains and request.job.objective != "pretrain"):
            return None
        return replace(request, pins=request.pins.but(**self.pins, **first))

    def open_steps(self, request: Request) -> dict[str, tuple[Any, ...]]:
        """The steps of fields that the user left to the planner."""
        return {name: values for name, values in self.steps.items() if getattr(request.pins, name) is None}

    @property
    def forbidden_by(self) -> str:
        """The pin that forbids it."""
        name = list(self.pins)[-1]
        value = DEFAULTS[name]
        return f"layout.{name}={str(value).lower() if isinstance(value, bool) else value}"


ON_HOST = Fallback(
    what="Megatron's optimizer on the host",
    price="The CPU steps it",
    pins={"engine": "megatron", "offload_optimizer": "cpu"},
    steps={"optimizer_offload_fraction": (0.25, 0.5, 0.75, 1.0)},
)
"""Taken too where the usual layouts that fit offload their own optimizer and take longer."""
COST_TIME = (
    ON_HOST,
    Fallback(
        what="saved layer inputs on the host beside offloaded state",
        price="Both share the host's link. No measurement supports the prediction",
        pins={"activation_offloading": True},
    ),
)
"""Last resorts that compute what the usual layouts compute."""
FALLBACKS: tuple[tuple[Fallback, ...], ...] = (
    COST_TIME,
    (
        Fallback(
            what="Megatron's moments in bf16",
            price="Accuracy: moments are rounded, and master weights stay fp32; no loss curve was compared. "
            "Megatron-LM runs it and kit's worker does not: start pretrain_gpt.sh; where the run directory has none, "
            "its README says why",
            pins={"engine": "megatron", "implementation": "transformer_engine", "optimizer_state_dtype": "bf16"},
            pretrains=True,
        ),
    ),
    (
        Fallback(
            what="DeepSpeed's master weights and moments in bf16",
            price="Accuracy: an update below a 256th of a weight is rounded away. After 60 steps of a tiny model the "
            "validation loss was 6.033 instead of 6.018 at a learning rate of 1e-3, and 6.825 instead of 6.786 at 1e-4",
            pins={"engine": "deepspeed", "optimizer_state_dtype": "bf16"},
        ),
    ),
)
"""Groups, in the order in which they are tried. The search takes the fastest layout of the first that has one."""


def without_loss(pins: Pins) -> Pins:
    """``pins`` that forbid what costs accuracy, unless it is pinned. Comparisons of clusters use them: a cluster is not
    the cheaper one because a plan rounds more on it."""
    return pins if pins.optimizer_state_dtype else pins.but(optimizer_state_dtype=DEFAULTS["optimizer_state_dtype"])

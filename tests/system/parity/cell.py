"""How far a layout lies from its reference: what the parity programs find, print and judge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.workers import WorkerError

BOUND = 1e-5
"""Largest relative error in fp32 of a gradient, ‖g − g_ref‖ / ‖g_ref‖, of a loss or norm of any step, or of a weight
after the last; reductions in another order give some 1e-7."""


@dataclass(frozen=True)
class Cell:
    """Errors of one layout, or why there are none."""

    bounds: Mapping[str, float]
    """Quantity → its largest relative error that counts as agreement."""
    errors: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """Quantity → the parameter or step of its error."""
    failure: str = ""
    seconds: float = 0.0

    def __getitem__(self, quantity: str) -> float:
        return self.errors.get(quantity, math.inf)

    @property
    def agrees(self) -> bool:
        """Within every bound; NaN is not."""
        return not self.failure and all(self[quantity] <= bound for quantity, bound in self.bounds.items())

    @property
    def caught(self) -> bool:
        """Whether a fault turned it red; one that cannot run was not seen."""
        return not self.agrees and not self.failure

    def told(self, what: str, fault: str | None = None) -> Cell:
        """Itself, after a line about it is printed."""
        at = {quantity: f" ({place})" for quantity, place in self.places.items()}
        figures = [f"{quantity} {self[quantity]:.1e}{at.get(quantity, '')}" for quantity in self.bounds]
        verdict = "agrees   " if self.agrees else "DISAGREES"
        planted = f" + {fault}" if fault else ""
        print(f"{verdict} {what}{planted}: {self.failure or ', '.join(figures)}", flush=True)
        return self


def measured(
    bounds: Mapping[str, float],
    compute: Callable[[], tuple[Mapping[str, float], Mapping[str, str]]],
    what: str,
    fault: str | None = None,
) -> Cell:
    """The errors that ``compute`` finds and their places, or why it cannot run; prints a line."""
    began, failure = time.monotonic(), ""
    errors, places = dict[str, float](), dict[str, str]()
    try:
        errors, places = compute()
    except WorkerError as error:
        failure = str(error)
    return Cell(bounds, errors, places, failure, time.monotonic() - began).told(what, fault)

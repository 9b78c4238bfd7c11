"""Times the parts of a step on the host's clock.

An engine returns from ``forward_backward`` with the loss on the host, so that part ends when the device is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Adds up the parts of one turn of the loop; what is left is the loop's own."""

    def __init__(self, kept_turns: int = 50) -> None:
        self.parts_s: dict[str, float] = {}
        self.gap_s: float | None = None
        """Time between the step before and this one, outside of all parts; None for the first step."""
        self._turns_s: deque[float] = deque(maxlen=kept_turns)
        self._began: float | None = None

    def turn(self) -> None:
        """A turn ends and the next begins."""
        now = time.perf_counter()
        if self._began is not None:
            whole = now - self._began
            self.gap_s = whole - sum(self.parts_s.values())
            self._turns_s.append(whole)
        self._began, self.parts_s = now, {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as this part's."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts_s[name] = self.parts_s.get(name, 0.0) + time.perf_counter() - began

    @property
    def step_s(self) -> float:
        """Data, forward, backward and optimizer of this turn."""
        return sum(self.parts_s.get(name, 0.0) for name in ("data", "forward_backward", "optimizer"))

    @property
    def pace_s(self) -> float | None:
        """A turn of the last ones, all included; None in the first."""
        return sum(self._turns_s) / len(self._turns_s) if self._turns_s else None

"""Times the parts of a step on the host's clock.

``forward_backward`` returns the loss on the host, so this part ends when the device is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Adds up the times of the parts of one iteration of the loop."""

    def __init__(self, kept_turns: int = 50) -> None:
        self.parts_s: dict[str, float] = {}
        self.gap_s: float | None = None
        """Time of the last iteration outside of all parts; None in the first iteration."""
        self._turns_s: deque[float] = deque(maxlen=kept_turns)
        self._began: float | None = None

    def turn(self) -> None:
        """End an iteration and begin the next."""
        now = time.perf_counter()
        if self._began is not None:
            whole = now - self._began
            self.gap_s = whole - sum(self.parts_s.values())
            self._turns_s.append(whole)
        self._began, self.parts_s = now, {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time while entered to part ``name``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts_s[name] = self.parts_s.get(name, 0.0) + time.perf_counter() - began

    @property
    def step_s(self) -> float:
        """Time of data, forward, backward and optimizer in this iteration."""
        return sum(self.parts_s.get(name, 0.0) for name in ("data", "forward_backward", "optimizer"))

    @property
    def pace_s(self) -> float | None:
        """Mean time of the recent iterations, with all parts; None in the first iteration."""
        return sum(self._turns_s) / len(self._turns_s) if self._turns_s else None

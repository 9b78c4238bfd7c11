"""``--profile``: a trace of chosen steps by torch's profiler, and what it says in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path


class Profiler:
    """Nothing but two comparisons a step where no trace is wanted."""

    def __init__(self, steps: tuple[int, int] | None, rundir: Path, is_main: bool) -> None:
        self._steps = steps

    def begin(self, step: int) -> None:
        """Before a step."""

    def end(self, step: int, say: Callable[[str], None]) -> None:
        """After it."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """A part of the step, to be found in the trace."""
        return nullcontext()

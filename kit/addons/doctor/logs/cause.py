"""The doctor's findings about a log."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause of a failure."""

    cause: str
    meaning: str
    fix: str
    ranks: tuple[int, ...]
    """Ranks whose logs show the cause; empty if unknown."""
    place: str
    """``file:line`` of its first line."""
    evidence: str
    """The line of the log that shows it."""
    weight: int
    phase: str | None = None
    step: int | None = None
    """Step in the line itself, or else the last step logged before the line."""
    frames: str | None = None
    """Origin of the exception: the innermost frame of the user's code, then the frame that raised."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the GPUs that the driver names."""

    @property
    def when(self) -> str:
        """``at step 4``, ``after step 2``; empty if no step was logged."""
        if self.step is None:
            return ""
        named = re.search(rf"(?i)\bstep\W{{0,3}}{self.step}\b", self.evidence)
        return f"{'at' if named else 'after'} step {self.step}"

    def __str__(self) -> str:
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        where += f" on GPU {', '.join(self.gpus)}" if self.gpus else ""
        phase = f" in {self.phase}" if self.phase else ""
        lines = [f"{self.cause}{where}{phase}{self.when and f' {self.when}'}: {self.meaning}"]
        lines += [f"  from   {self.frames}"] if self.frames else []
        lines += [f"  seen   {self.place}: {self.evidence[:400]}", f"  do     {self.fix}"]
        return "\n".join(lines)

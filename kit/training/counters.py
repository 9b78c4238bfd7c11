"""The counters of a run's progress, and checks of a checkpoint's counters against the run's schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from kit.errors import CheckpointError
from kit.planner.length import length
from kit.planner.plan import Plan
from kit.planner.schedule import ramped
from kit.specs.run import RunSpec
from kit.specs.text import first
from kit.specs.validation import SPEC, Within
from kit.training.logging.metrics import logged_rows
from kit.training.stream_cursor import StreamState

LARGEST = 2**63 - 1
"""Largest signed 64-bit number, the limit of metrics, arrays and other programs."""


_Count = Annotated[int, Within(ge=0, le=LARGEST)]


@dataclass(frozen=True)
class Counters:
    """Progress of a run. Learning rate and data order depend on these numbers alone. Raises ValueError if they
    contradict each other."""

    __pydantic_config__ = SPEC
    step: _Count
    """Number of finished steps of the loop."""
    samples_seen: _Count
    """Sequences of these steps, over all ranks. 0, like ``tokens_seen``, if another program's checkpoint does not say
    it."""
    tokens_seen: _Count
    """Tokens of these sequences, without padding."""
    optimizer_steps: _Count
    """Adam's step count (bias correction)."""
    samples_skipped: _Count
    """Sequences that rewinds skipped. The next sample has number ``samples_seen + samples_skipped``."""
    stream: StreamState | None = None
    """In a checkpoint of a run that streams its data: where it stands in the sources. Saves time only."""

    def __post_init__(self) -> None:
        step, samples, tokens = self.step, self.samples_seen, self.tokens_seen
        reasons = {
            f"optimizer_steps={self.optimizer_steps} is more than step={step}": self.optimizer_steps > step,
            f"samples_seen={samples} at step=0 must be 0": samples and not step,
            f"samples_seen={samples} is less than one in each of step={step}": 0 < samples < step,
            f"tokens_seen={tokens} with samples_seen=0 must be 0": tokens and not samples,
            f"tokens_seen={tokens} is less than samples_seen={samples}": 0 < tokens < samples,
        }
        if disagrees := first(reasons, "counters.{}"):
            raise ValueError(disagrees)

    @property
    def position(self) -> int:
        """Number of the next sample in the order of the data."""
        return self.samples_seen + self.samples_skipped


START = Counters(step=0, samples_seen=0, tokens_seen=0, optimizer_steps=0, samples_skipped=0)
"""Counters of a run that has made no step."""


@dataclass(frozen=True)
class RunLength:
    """The counters that a run's schedule allows."""

    total_steps: int
    samples_after: Callable[[int], int]
    """Number of steps from the beginning → number of their sequences."""

    def check(self, counters: Counters, checkpoint: Path, same_plan: bool) -> None:
        """Raises CheckpointError if a checkpoint's counters are beyond the run's end, or contradict ``metrics.jsonl``
        of the run that wrote it. Without these metrics, and with the same plan, compares with the schedule instead."""
        if counters.step > self.total_steps:
            raise CheckpointError(
                f"{checkpoint} is of step {counters.step} and this run ends after step {self.total_steps}; resume from "
                "an earlier one, or make the run longer (job.epochs, run.steps or job.total_tokens) and emit again"
            )
        metrics = checkpoint.parent.parent / "metrics.jsonl"
        logged = _logged_samples(metrics, counters.step)
        if logged is not None and logged != counters.samples_seen:
            raise CheckpointError(
                f"{checkpoint} says samples_seen={counters.samples_seen} and {metrics} has {logged} at step "
                f"{counters.step}; they belong to different runs: resume from another checkpoint of it"
            )
        if logged is None and same_plan and (expected := self.samples_after(counters.step)) != counters.samples_seen:
            raise CheckpointError(
                f"{checkpoint} says samples_seen={counters.samples_seen} and the first {counters.step} steps of this "
                f"run take {expected}; resume from another checkpoint, or put its metrics.jsonl back"
            )


def run_length(plan: Plan, run: RunSpec) -> RunLength:
    """The ``RunLength`` of a run. Raises SpecError as ``kit.planner.length.length`` does."""
    full, ramp = plan.layout.global_batch_size, run.schedule.batch_ramp

    def samples_after(steps: int) -> int:
        sizes = list(islice(ramped(ramp, full), steps)) if ramp is not None else []
        return sum(sizes) + (steps - len(sizes)) * full

    return RunLength(length(plan, run)[0], samples_after)


def _logged_samples(metrics: Path, step: int) -> int | None:
    """``samples_seen`` in the last row of a step; None if there is no readable row."""
    try:
        said = [row.get("samples_seen") for _, row in logged_rows(metrics) if row is not None and row["step"] == step]
    except (OSError, ValueError):
        return None
    return said[-1] if said and type(said[-1]) is int else None

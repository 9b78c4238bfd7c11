"""How far a run is: the counters, what they must be among themselves, and in the run that goes on from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from kit.errors import CheckpointError
from kit.planner.plan import Plan
from kit.planner.schedule import length, ramped
from kit.specs.base import SPEC, Within
from kit.specs.run import RunSpec
from kit.training.logging.metrics import logged_rows

LARGEST = 2**63 - 1
"""What a signed 64-bit number holds: as metrics, arrays and other programs read them."""


_Count = Annotated[int, Within(ge=0, le=LARGEST)]


@dataclass(frozen=True)
class Counters:
    """How far a run is; the learning rate and the data order follow from these alone. Raises ValueError where they
    disagree."""

    __pydantic_config__ = SPEC
    step: _Count
    """Steps of the loop done."""
    samples_seen: _Count
    """Sequences in them, over all ranks; 0 where another program's checkpoint does not say it, and so are tokens."""
    tokens_seen: _Count
    """Tokens in those sequences."""
    optimizer_steps: _Count
    """Adam's step count (bias correction)."""
    samples_skipped: _Count
    """Sequences that rewinds left out: the next sample is number ``samples_seen + samples_skipped``."""

    def __post_init__(self) -> None:
        step, samples, tokens = self.step, self.samples_seen, self.tokens_seen
        for disagrees, why in (
            (self.optimizer_steps > step, f"optimizer_steps={self.optimizer_steps} is more than step={step}"),
            (samples and not step, f"samples_seen={samples} at step=0 must be 0"),
            (0 < samples < step, f"samples_seen={samples} is less than one in each of step={step}"),
            (tokens and not samples, f"tokens_seen={tokens} with samples_seen=0 must be 0"),
            (0 < tokens < samples, f"tokens_seen={tokens} is less than samples_seen={samples}"),
        ):
            if disagrees:
                raise ValueError(f"counters.{why}")

    @property
    def position(self) -> int:
        """Number of the next sample in the order of the data."""
        return self.samples_seen + self.samples_skipped


START = Counters(step=0, samples_seen=0, tokens_seen=0, optimizer_steps=0, samples_skipped=0)
"""Counters of a run that has made no step."""


@dataclass(frozen=True)
class RunLength:
    """What the counters of a run may be, by its schedule."""

    total_steps: int
    samples_after: Callable[[int], int]
    """Steps from the beginning → sequences in them."""

    def check(self, counters: Counters, checkpoint: Path, same_plan: bool) -> None:
        """Raises CheckpointError where the counters of a checkpoint are beyond the run's end, or say something else
        than the metrics of the run that wrote it; without these, and under the same plan, than the schedule."""
        if counters.step > self.total_steps:
            raise CheckpointError(
                f"{checkpoint} is of step {counters.step} and this run ends after step {self.total_steps}; resume from "
                f"an earlier one, or raise run.steps (job.total_tokens) and emit again"
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
    """What the counters of a run may be. Raises SpecError, see ``kit.planner.schedule.length``."""
    full, ramp = plan.layout.global_batch_size, run.schedule.batch_ramp

    def samples_after(steps: int) -> int:
        sizes = list(islice(ramped(ramp, full), steps)) if ramp is not None else []
        return sum(sizes) + (steps - len(sizes)) * full

    return RunLength(length(plan, run)[0], samples_after)


def _logged_samples(metrics: Path, step: int) -> int | None:
    """What the last row of a step says; None where there is none that can be read."""
    try:
        said = [row.get("samples_seen") for _, row in logged_rows(metrics) if row is not None and row["step"] == step]
    except (OSError, ValueError):
        return None
    return said[-1] if said and type(said[-1]) is int else None

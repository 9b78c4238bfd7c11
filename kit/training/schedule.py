"""Learning rate and batch size: pure functions of the samples seen, so no engine and no checkpoint owns a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs.run import BatchRampSpec, RunSpec, ScheduleSpec
from kit.training.checkpoint.counters import RunLength


def learning_rate(
    samples_seen: int,
    *,
    peak: float,
    schedule: ScheduleSpec,
    total_steps: int,
    global_batch_size: int,
    total_samples: int | None = None,
) -> float:
    """Rate of the optimizer step after which ``samples_seen`` samples will have been seen.

    Counting the step itself makes the first step of a warm-up train (rate peak/warm-up, not 0), and the last step
    of a cosine end on ``min_ratio · peak`` exactly. The warm-up is ``schedule.warmup_steps`` whole batches, or a tenth
    of a run that is shorter than ten times that. Beyond the end the rate stays where it ended. ``total_samples``: of a
    run whose batch grows; otherwise steps times batch.
    """
    total_samples = total_samples or total_steps * global_batch_size
    warmup_samples = min(schedule.warmup_steps * global_batch_size, total_samples / 10)
    if samples_seen < warmup_samples:
        return peak * samples_seen / warmup_samples
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (samples_seen - warmup_samples) / (total_samples - warmup_samples))
    cosine = (1 + math.cos(math.pi * progress)) / 2  # Loshchilov & Hutter 2017 (SGDR), eq. 5, without restarts
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * cosine)


def batch_size(samples_seen: int, ramp: BatchRampSpec | None, full: int) -> int:
    """Sequences of the step that follows ``samples_seen`` samples.

    As Megatron-LM counts it (num_microbatches_calculator.py, rampup_batch_size): from ``ramp.start`` by
    ``ramp.increment`` to ``full``, each size for ``ramp.samples`` over the number of increments.
    """
    if ramp is None or samples_seen >= ramp.samples:
        return full
    increments = (full - ramp.start) // ramp.increment
    return min(full, ramp.start + ramp.increment * (samples_seen * increments // ramp.samples))


def length(plan: Plan, run: RunSpec) -> tuple[int, int]:
    """(optimizer steps, samples) of the whole run: ``run.steps``, or as many as fit into the token budget, one at
    least. Raises SpecError for a ramp that the layout cannot take."""
    full, ramp = plan.layout.global_batch_size, run.schedule.batch_ramp
    budget = plan.job.total_tokens // plan.job.seq_length
    if ramp is None:
        steps = run.steps or max(1, budget // full)
        return steps, steps * full
    _check_ramp(plan, ramp)
    steps = samples = 0
    for size in _ramped(ramp, full):
        if (run.steps is not None and steps == run.steps) or (run.steps is None and samples + size > budget and steps):
            return steps, samples
        steps, samples = steps + 1, samples + size
    left = run.steps - steps if run.steps is not None else max(0, (budget - samples) // full)
    return steps + left, samples + left * full


def run_length(plan: Plan, run: RunSpec) -> RunLength:
    """What the counters of a run may be. Raises SpecError, see ``length``."""
    full, ramp = plan.layout.global_batch_size, run.schedule.batch_ramp

    def samples_after(steps: int) -> int:
        ramped = list(islice(_ramped(ramp, full), steps)) if ramp is not None else []
        return sum(ramped) + (steps - len(ramped)) * full

    return RunLength(length(plan, run)[0], samples_after)


def _check_ramp(plan: Plan, ramp: BatchRampSpec) -> None:
    """Raises SpecError that names the nearest sizes that can be."""
    layout, full = plan.layout, plan.layout.global_batch_size
    unit = layout.micro_batch_size * layout.dp * (layout.pp if layout.vp > 1 else 1)
    for key, value in (("start", ramp.start), ("increment", ramp.increment)):
        if value % unit:
            raise SpecError(
                f"run.schedule.batch_ramp.{key}={value} is not a multiple of micro_batch_size · dp"
                f"{' · pp (an interleaved pipeline)' if layout.vp > 1 else ''} = {unit}; "
                f"use {max(unit, value // unit * unit)} or {(value // unit + 1) * unit}"
            )
    if ramp.start >= full or (full - ramp.start) % ramp.increment:
        raise SpecError(
            f"run.schedule.batch_ramp goes from {ramp.start} by {ramp.increment}, which does not meet "
            f"job.global_batch_size={full}; choose an increment that divides the difference"
        )


def _ramped(ramp: BatchRampSpec, full: int) -> Iterator[int]:
    """Sizes of the steps before the whole batch is reached."""
    samples = 0
    while samples < ramp.samples:
        size = batch_size(samples, ramp, full)
        yield size
        samples += size

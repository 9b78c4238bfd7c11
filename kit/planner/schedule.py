"""Learning rate, batch size and length of a run: pure functions of the samples seen, so no engine owns a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs.run import BatchRampSpec, RunSpec, ScheduleSpec

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: 1 - passed,
    "cosine": lambda passed: (1 + math.cos(math.pi * passed)) / 2,  # Loshchilov & Hutter 2017 (SGDR), eq. 5
    "exponential": lambda passed: 2 * 0.5**passed - 1,
    "minus_sqrt": lambda passed: 1 - math.sqrt(passed),
}
"""What is left above the final rate after a part of the decay: 1 at 0, and 0 at 1. Names and forms are those of
megatron.core.optimizer_param_scheduler."""


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
    seen = min(samples_seen, total_samples)
    if schedule.kind == "inverse_sqrt":
        return peak * max(schedule.min_ratio, math.sqrt(warmup_samples / seen))
    passed = (seen - warmup_samples) / (total_samples - warmup_samples)
    if schedule.kind == "warmup_stable_decay":
        decay_samples = decay_steps(schedule, total_steps) / total_steps * total_samples
        left = _DECAYS[schedule.decay_style](max(0.0, 1 - (total_samples - seen) / decay_samples))
    elif schedule.kind == "cosine_with_restarts":
        left = _DECAYS["cosine"](schedule.num_cycles * passed % 1 if passed < 1 else 1)
    else:
        left = _DECAYS[schedule.kind](passed)
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * left)


def decay_steps(schedule: ScheduleSpec, total_steps: int) -> float:
    """Steps of the decay at the end of ``warmup_stable_decay``."""
    return schedule.decay_steps or total_steps / 10


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
    least. Raises SpecError for a schedule that is longer than the run, or a ramp that the layout cannot take."""
    steps, samples = _length(plan, run)
    schedule = run.schedule
    warmup = min(schedule.warmup_steps, steps / 10)
    if schedule.kind == "warmup_stable_decay" and decay_steps(schedule, steps) > steps - warmup:
        raise SpecError(
            f"run.schedule.decay_steps={schedule.decay_steps} is more than the {steps:,} steps of the run less its "
            f"warm-up of {warmup:g}; use at most {math.floor(steps - warmup)}, or train for longer"
        )
    return steps, samples


def _length(plan: Plan, run: RunSpec) -> tuple[int, int]:
    full, ramp = plan.layout.global_batch_size, run.schedule.batch_ramp
    budget = plan.job.total_tokens // plan.job.seq_length
    if ramp is None:
        steps = run.steps or max(1, budget // full)
        return steps, steps * full
    _check_ramp(plan, ramp)
    steps = samples = 0
    for size in ramped(ramp, full):
        if (run.steps is not None and steps == run.steps) or (run.steps is None and samples + size > budget and steps):
            return steps, samples
        steps, samples = steps + 1, samples + size
    left = run.steps - steps if run.steps is not None else max(0, (budget - samples) // full)
    return steps + left, samples + left * full


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


def ramped(ramp: BatchRampSpec, full: int) -> Iterator[int]:
    """Sizes of the steps before the whole batch is reached."""
    samples = 0
    while samples < ramp.samples:
        size = batch_size(samples, ramp, full)
        yield size
        samples += size

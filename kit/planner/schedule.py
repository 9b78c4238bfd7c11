"""Learning rate and batch size of a run, as pure functions of the samples seen, for all engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from kit.planner.plan import Plan
from kit.specs.job import JobSpec
from kit.specs.job_defaults import defaults_of
from kit.specs.run import BatchRampSpec, RunSpec, ScheduleSpec
from kit.specs.text import refuse

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: 1 - passed,
    "cosine": lambda passed: (1 + math.cos(math.pi * passed)) / 2,  # Loshchilov & Hutter 2017 (SGDR), eq. 5
    "exponential": lambda passed: 2 * 0.5**passed - 1,
    "minus_sqrt": lambda passed: 1 - math.sqrt(passed),
}
"""Name → factor between the final rate (0) and the peak rate (1), by the part of the decay that has passed. Names and
formulas are those of megatron.core.optimizer_param_scheduler."""


def learning_rate(
    samples_seen: int,
    *,
    peak: float,
    schedule: ScheduleSpec,
    total_steps: int,
    global_batch_size: int,
    total_samples: int | None = None,
) -> float:
    """Learning rate of an optimizer step. ``samples_seen`` includes the samples of this step.

    So the first step of a warm-up has the rate peak/warmup_steps, not 0, and the last step of a cosine has exactly
    ``min_ratio · peak``. After the end the rate stays constant. ``total_samples``: samples of the run if its batch size
    ramps up; by default steps times batch.
    """
    total_samples = total_samples or total_steps * global_batch_size
    warmup_samples = warmup(schedule, total_samples, global_batch_size)
    if samples_seen < warmup_samples:
        return peak * samples_seen / warmup_samples
    if schedule.kind == "constant":
        return peak
    seen = min(samples_seen, total_samples)
    if schedule.kind == "inverse_sqrt":
        return peak * max(schedule.min_ratio, math.sqrt(warmup_samples / seen))
    passed = (seen - warmup_samples) / (total_samples - warmup_samples)
    if schedule.kind == "warmup_stable_decay":
        decay_samples = (schedule.decay_steps or total_steps / 10) / total_steps * total_samples
        left = _DECAYS[schedule.decay_style](max(0.0, 1 - (total_samples - seen) / decay_samples))
    elif schedule.kind == "cosine_with_restarts":
        left = _DECAYS["cosine"](schedule.num_cycles * passed % 1 if passed < 1 else 1)
    else:
        left = _DECAYS[schedule.kind](passed)
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * left)


def warmup(schedule: ScheduleSpec, whole: float, step: float = 1) -> float:
    """Length of the warm-up of a run of length ``whole``: in steps, or in samples where a ``step`` has several. A
    number of steps is cut to a tenth of the run; a share of the run is taken as it is."""
    given = defaults_of("pretrain", False).warmup_steps if schedule.warmup_steps is None else schedule.warmup_steps
    return given * whole if given < 1 else min(given * step, whole / 10)


def with_usual_warmup(run: RunSpec, job: JobSpec) -> RunSpec:
    """The run with the warm-up of its objective, where it names none."""
    if run.schedule.warmup_steps is not None:
        return run
    usual = defaults_of(job.objective, job.lora is not None).warmup_steps
    return replace(run, schedule=replace(run.schedule, warmup_steps=usual))


def batch_size(samples_seen: int, ramp: BatchRampSpec | None, full: int) -> int:
    """Global batch size, in sequences, of the step after ``samples_seen`` samples.

    It grows from ``ramp.start`` by ``ramp.increment`` to ``full``; each size lasts ``ramp.samples`` divided by the
    number of increments, as in Megatron-LM (num_microbatches_calculator.py, rampup_batch_size).
    """
    if ramp is None or samples_seen >= ramp.samples:
        return full
    increments = (full - ramp.start) // ramp.increment
    return min(full, ramp.start + ramp.increment * (samples_seen * increments // ramp.samples))


def check_ramp(plan: Plan, run: RunSpec) -> None:
    """Raises SpecError, with the nearest possible sizes, if the layout cannot run the batch ramp of the run."""
    layout, full, ramp = plan.layout, plan.layout.global_batch_size, run.schedule.batch_ramp
    if ramp is None:
        return
    unit = layout.micro_batch_size * layout.dp * (layout.pp if layout.vp > 1 else 1)
    pipeline = " · pp (an interleaved pipeline)" if layout.vp > 1 else ""
    reasons = {
        f"run.schedule.batch_ramp.{key}={value} is not a multiple of micro_batch_size · dp{pipeline} = {unit}; use "
        f"{max(unit, value // unit * unit)} or {(value // unit + 1) * unit}": value % unit
        for key, value in (("start", ramp.start), ("increment", ramp.increment))
    }
    unmet = (
        f"run.schedule.batch_ramp goes from {ramp.start} by {ramp.increment}, which does not meet "
        f"job.global_batch_size={full}; choose an increment that divides the difference"
    )
    refuse(reasons | {unmet: ramp.start >= full or (full - ramp.start) % ramp.increment})


def ramped(ramp: BatchRampSpec, full: int) -> Iterator[int]:
    """Batch size of each step before the full batch is reached."""
    samples = 0
    while samples < ramp.samples:
        size = batch_size(samples, ramp, full)
        yield size
        samples += size

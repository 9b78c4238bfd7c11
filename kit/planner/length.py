"""The length of a run: ``job.epochs``, ``run.steps`` or ``job.total_tokens`` → optimizer steps and samples."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.planner.schedule import check_ramp, ramped, warmup
from kit.specs.epoch import Epoch, epoch_on_disk
from kit.specs.job_defaults import defaults_of
from kit.specs.run import RunSpec

MOST_EPOCHS = 20
"""A longer run asks for run.data.allow_many_epochs. After some 16 epochs repeated data teach little more (Muennighoff
et al. 2023, arXiv 2305.16264), and fine-tuning takes one to five."""


def length(plan: Plan, run: RunSpec, epoch: Epoch | None = None) -> tuple[int, int]:
    """(optimizer steps, samples) of the whole run: ``run.steps``; or as many steps as ``job.epochs`` takes, the last
    one whole; or as many as ``job.total_tokens`` allows, at least one. ``epoch``: of the training data, where
    ``needs_epoch``.

    Raises SpecError for rows without a length, if the schedule is longer than the run, and if the layout cannot run a
    size of the batch ramp."""
    check_ramp(plan, run)
    steps, samples = _length(plan, run, epoch)
    schedule = run.schedule
    warming = warmup(schedule, steps)
    if schedule.decay_steps is not None and schedule.decay_steps > steps - warming:
        raise SpecError(
            f"run.schedule.decay_steps={schedule.decay_steps} is more than the {steps:,} steps of the run less its "
            f"warm-up of {warming:g}; use at most {math.floor(steps - warming)}, or train for longer"
        )
    return steps, samples


def known_length(plan: Plan, run: RunSpec) -> tuple[int, int] | None:
    """``length``, as far as it is known before the run; None where only the run can count its samples.

    Raises SpecError as ``length`` and ``check_epochs`` do, and for a length that is given twice."""
    if run.steps is not None and plan.job.epochs is not None:
        raise SpecError(
            f"run.steps={run.steps} and job.epochs={plan.job.epochs:g} are both there; the length of a run is one of "
            "job.epochs, run.steps and job.total_tokens: leave out one"
        )
    epoch = epoch_on_disk(run.data, plan.job.objective)
    check_epochs(plan, run, epoch)
    if not run.data.named and run.steps is None and plan.job.total_tokens is None:
        return None  # of a script that reads its own data
    if epoch is None and needs_epoch(plan, run):
        check_ramp(plan, run)
        return None
    return length(plan, run, epoch)


def for_run(plan: Plan, run: RunSpec | None) -> Plan:
    """The plan with days and money of the run's steps, where ``run.steps`` or the data on this disk say them."""
    if run is None:
        return plan
    epoch = epoch_on_disk(run.data, plan.job.objective)
    if run.steps is None and (epoch is None or (epochs_of(plan, run) is None and plan.job.total_tokens is None)):
        return plan
    return replace(plan, predicted=plan.predicted.for_steps(_length(plan, run, epoch)[0], plan.cluster))


def epochs_of(plan: Plan, run: RunSpec) -> float | None:
    """Passes over the training data: ``job.epochs``; of one set without any length what is usual for the objective;
    None where the length is another or nobody says one."""
    job, data = plan.job, run.data
    if job.epochs is not None or run.steps is not None or job.total_tokens is not None or data.train is None:
        return job.epochs
    return defaults_of(job.objective, job.lora is not None).epochs


def needs_epoch(plan: Plan, run: RunSpec) -> bool:
    """Whether the number of steps follows from the data. Raises SpecError for a blend or a stream without a length, and
    for epochs of data that have none."""
    job, data = plan.job, run.data
    if run.steps is not None or not data.named:
        return False
    if job.epochs is not None and (data.blend or data.stream is not None):
        why = "blend, whose sets each have epochs of their own" if data.blend else "stream, whose length nobody knows"
        raise SpecError(f"job.epochs={job.epochs:g} with run.data.{why}; use run.steps or job.total_tokens")
    if epochs_of(plan, run) is None and job.total_tokens is None:
        raise SpecError(
            f"objective={job.objective} without a length: none of job.epochs, run.steps and job.total_tokens is there; "
            "say how long the run is, such as job.epochs=3"
        )
    return epochs_of(plan, run) is not None or job.objective != "pretrain"


def check_epochs(plan: Plan, run: RunSpec, epoch: Epoch | None) -> None:
    """Raises SpecError if the run sees its data more than ``MOST_EPOCHS`` times and nobody says that this is meant.
    ``epoch``: of the training data; None if not known."""
    asked = epochs_of(plan, run)
    epochs, counted = asked or 0.0, ""
    many = epochs > MOST_EPOCHS
    if asked is None and epoch is not None:
        steps, samples = length(plan, run, epoch)
        many = samples - plan.layout.global_batch_size > MOST_EPOCHS * epoch.samples  # the last step is whole
        epochs, counted = samples / epoch.samples, f" of {epoch.samples:,} samples in {steps:,} steps"
    if many and not run.data.allow_many_epochs:
        raise SpecError(
            f"the run makes {epochs:,.1f} epochs{counted}, and more than {MOST_EPOCHS} are rarely meant; change "
            "job.epochs, run.steps or job.total_tokens, or say that it is meant: run.data.allow_many_epochs=true"
        )


def _length(plan: Plan, run: RunSpec, epoch: Epoch | None) -> tuple[int, int]:
    full, ramp = plan.layout.global_batch_size, run.schedule.batch_ramp
    budget = 0 if run.steps is not None else _budget(plan, run, epoch)
    begun = epochs_of(plan, run) is not None

    def fit(samples: int, size: int) -> int:
        """Steps of a size after so many samples; epochs take the step that their last sample begins."""
        return (budget - samples + (size - 1 if begun else 0)) // size

    steps = samples = 0
    for size in ramped(ramp, full) if ramp is not None else ():
        if steps == run.steps if run.steps is not None else steps and fit(samples, size) < 1:
            return steps, samples
        steps, samples = steps + 1, samples + size
    left = run.steps - steps if run.steps is not None else max(0 if steps else 1, fit(samples, full))
    return steps + left, samples + left * full


def _budget(plan: Plan, run: RunSpec, epoch: Epoch | None) -> int:
    """Samples of a run whose length is epochs or tokens."""
    job, counts = plan.job, needs_epoch(plan, run)
    if not counts:
        return (job.total_tokens or 0) // job.seq_length
    assert epoch is not None, "the run counts its data first"
    if (epochs := epochs_of(plan, run)) is not None:
        return math.ceil(Fraction(str(epochs)) * epoch.samples)  # 0.1 is a tenth, not the nearest binary fraction
    return (job.total_tokens or 0) * epoch.samples // epoch.tokens

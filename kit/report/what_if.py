"""Explains a plan: its decisions, its limits, and the effect of changes."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from kit.cost.estimate import cost_usd
from kit.errors import SpecError
from kit.planner.calibration import NONE, Calibration, is_corrected
from kit.planner.make_plan import fastest_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.sweep import Variant, sweep
from kit.report.bottlenecks import Bottleneck, bottlenecks
from kit.report.pipeline_schedule import timeline
from kit.report.plan_text import render
from kit.report.view import WIDTH, PlanView, view_of
from kit.specs import strict_yaml
from kit.specs.catalog import parse_cluster
from kit.specs.job import LENGTHS_OF_JOB, JobSpec
from kit.specs.layout import Pins, describe
from kit.units import human_count, human_seconds

_BAR = 50


@dataclass(frozen=True)
class WhatIf:
    """The effect of a change."""

    change: str
    plan: Plan | None
    """The plan with the change; None if there is none."""
    note: str
    """Why there is no plan, or which pins the change removed; else empty."""

    def text(self, before: Plan) -> str:
        """Compares the new plan with the old one."""
        head = f"what if {self.change}"
        if self.plan is None:
            return f"{head}: no plan\n" + textwrap.indent(self.note, "  ")
        note = f", {self.note}" if self.note else ""
        return "\n".join([f"{head}{note}: {describe(self.plan.layout)}", *_changes(before, self.plan)])


@dataclass(frozen=True)
class Explanation:
    """A plan, its limits, and the effects of changes."""

    plan: Plan
    limits: tuple[Bottleneck, ...]
    """What takes time beside the work itself, the largest first; then memory."""
    unpinned: Plan | None
    """The plan without any pin; None if nothing is pinned, or if no such plan exists."""
    what_if: tuple[WhatIf, ...]

    def __str__(self) -> str:
        """The whole plan with its decisions, what limits it, where a step's time goes, the schedule, and what-ifs."""
        plan, view = self.plan, view_of(self.plan)
        blocks = [
            render(view),
            _limits(self.limits),
            _breakdown(view),
            _schedule(view),
            _without_pins(plan, self.unpinned),
            *(each.text(plan) for each in self.what_if),
        ]
        return "\n\n".join(block for block in blocks if block)


def explain(
    plan: Plan, pins: Pins | None = None, changes: tuple[str, ...] = (), calibration: Calibration = NONE
) -> Explanation:
    """Explains a plan, and compares it with the plans after each of ``changes``. ``pins``: by default the plan's own.

    Applies ``calibration`` to other plans if this plan is calibrated, so that they are comparable.
    """
    calibration = calibration if is_corrected(plan.predicted) else NONE
    pins = pinned(plan) if pins is None else pins
    free = Request(model=plan.model, cluster=plan.cluster, job=plan.job, calibration=calibration)
    unpinned = [Variant("", free)] if pins != Pins() else []
    return Explanation(
        plan=plan,
        limits=bottlenecks(plan),
        unpinned=next((each.found for each in sweep(unpinned, lambda each: fastest_plan(each.request))), None),
        what_if=tuple(what_if(plan, change, pins, calibration) for change in changes),
    )


def pinned(plan: Plan) -> Pins:
    """The choices that the plan calls pinned."""
    names = {field.name for field in dataclasses.fields(Pins)}
    chosen = {decision.rule for decision in plan.decisions if decision.why == "pinned"} & names
    return Pins(**{name: getattr(plan.layout, name) for name in chosen})


def _limits(found: tuple[Bottleneck, ...]) -> str:
    lines = [f"limited by: {found[0].what}"]
    lines += [f"  {limit.share:>6.1%}  {limit.what}: {limit.words}" for limit in found if limit.share >= 0.001]
    return "\n".join(lines)


def _breakdown(view: PlanView) -> str:
    step = view.plan.predicted.step_time_s
    parts = (
        f"  {name:<18}{human_seconds(seconds):>9}  {'#' * max(1, round(_BAR * seconds / step))}"
        for name, seconds in view.shown_s.items()
    )
    return "\n".join([f"a step of {human_seconds(step)}", *parts])


def _schedule(view: PlanView) -> str:
    layout, drawn = view.plan.layout, view.drawn
    if drawn is None:
        return ""
    head = "schedule (digits: forward of a micro batch, letters: its backward, dots: idle)"
    if drawn != (layout.pp, layout.vp, layout.gradient_accumulation_steps):
        head += (
            f", drawn with {drawn.pp} of {layout.pp} stages, {drawn.micro_batches} of "
            f"{layout.gradient_accumulation_steps} micro batches"
            + (f", {drawn.vp} of {layout.vp} virtual stages" if drawn.vp != layout.vp else "")
        )
    return f"{head}\n{timeline(*drawn)}"


def _without_pins(plan: Plan, free: Plan | None) -> str:
    if free is None:
        return ""
    if free.layout == plan.layout:
        return "left to the planner, the same layout would be chosen"
    return "\n".join([f"left to the planner: {describe(free.layout)}", *_changes(plan, free)])


def what_if(plan: Plan, change: str, pins: Pins | None = None, calibration: Calibration = NONE) -> WhatIf:
    """Plans again with ``cluster=16xH200``, a key of the job (``job.seq_length=131072``) or a choice of the layout
    (``layout.tp=4``). Raises ``SpecError`` for any other change."""
    cluster, job, pins = plan.cluster, plan.job, pinned(plan) if pins is None else pins
    key, equals, text = change.partition("=")
    section, _, name = key.partition(".")
    names = {
        "cluster": {""},
        "job": {field.name for field in dataclasses.fields(job)},
        "layout": {field.name for field in dataclasses.fields(pins)},
    }
    if not equals or name not in names.get(section, ()):
        like = "cluster=16xH200, job.seq_length=131072 or layout.tp=4"
        own = [f"{other}.{key}" for other in ("job", "layout") if key in names[other]] + ["cluster"] * (key == "gpus")
        today = f"; write {own[0]}={text}" if own and equals else ""
        raise SpecError(f"--what-if {change!r} is not a change that kit knows, such as {like}{today}")
    given = strict_yaml.parse_text(f"{name or key}: {text}", "--what-if")
    if section == "cluster":
        cluster = parse_cluster(text)
    elif section == "job":
        lengths = dict.fromkeys(LENGTHS_OF_JOB) if name in LENGTHS_OF_JOB else {}
        job = strict_yaml.parse(JobSpec, {**strict_yaml.to_plain(job), **lengths, **given.data}, given)
    else:
        pins = strict_yaml.parse(Pins, {**strict_yaml.to_plain(pins), **given.data}, given)
    free = Request(model=plan.model, cluster=cluster, job=job, calibration=calibration)
    variants = [Variant("", dataclasses.replace(free, pins=pins))]
    if pins != Pins() and section != "layout":
        variants.append(Variant("pins left to the planner (with them there is no plan)", free))
    for outcome in sweep(variants, lambda each: fastest_plan(each.request)):
        if outcome.found is not None:
            break
    return WhatIf(change, outcome.found, outcome.why_none or outcome.variant.label)


def compared(before: Plan, after: Plan) -> list[tuple[str, float, float, Callable[[float], str]]]:
    """Rows of (quantity, before, after, formatter), for quantities that both plans have."""
    step, days = before.predicted.step_time_s, _days(before, after)
    rows: list[tuple[str, float, float | None, Callable[[float], str]]] = [
        ("step", step, after.predicted.step_time_s, lambda value: human_seconds(value, like=step)),
        ("tokens/s a GPU", _speed(before), _speed(after), human_count),
        ("MFU", before.predicted.mfu, after.predicted.mfu, lambda value: f"{value:.1%}"),
        ("peak GiB", before.predicted.peak_gib, after.predicted.peak_gib, lambda value: f"{value:.1f}"),
        ("days", before.predicted.days or 0.0, days, lambda value: f"{value:.3g}"),
        ("USD", before.predicted.cost_usd or 0.0, cost_usd(after.cluster, days), lambda value: f"{value:,.0f}"),
    ]
    return [(name, old, new, show) for name, old, new, show in rows if old and new]


def _days(before: Plan, after: Plan) -> float | None:
    """Days of the other plan: for the same tokens of text or the same rows, unless the length is what changes."""
    if any(getattr(before.job, name) != getattr(after.job, name) for name in LENGTHS_OF_JOB):
        return after.predicted.days
    ours, theirs = (
        plan.predicted.step_time_s
        / (plan.job.tokens_per_step if plan.job.objective == "pretrain" else plan.job.global_batch_size)
        for plan in (before, after)
    )
    return None if before.predicted.days is None else before.predicted.days * theirs / ours


def _changes(before: Plan, after: Plan) -> list[str]:
    lines = [
        f"  {name:<16}{show(old):>10} → {show(new):<10} {new / old - 1:+.1%}"
        for name, old, new, show in compared(before, after)
    ]
    ours, theirs = before.predicted.step_time_components_s, after.predicted.step_time_components_s
    shares = {
        name: theirs.get(name, 0.0) / after.predicted.step_time_s - seconds / before.predicted.step_time_s
        for name, seconds in ours.items()
    }
    moved = sorted((name for name in shares if abs(shares[name]) >= 0.01), key=lambda name: -abs(shares[name]))
    if moved:
        parts = ", ".join(f"{name.replace('_', ' ')} {shares[name]:+.1%}" for name in moved[:4])
        lines += textwrap.wrap(f"shares of the step: {parts}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _speed(plan: Plan) -> float:
    return plan.predicted.tokens_per_s / plan.cluster.num_gpus

"""A plan as text for a terminal: layout, memory, speed, cost and reasons."""

from __future__ import annotations

import textwrap

from kit.cost.estimate import Prediction
from kit.cost.reliability import Operation
from kit.planner.calibration import is_corrected
from kit.planner.plan import Decision
from kit.report.view import WIDTH, PlanView, at_most, cells, money, run_length
from kit.units import SECONDS_PER_DAY, human_count, human_seconds

_STAGES_SHOWN = 6


def render(view: PlanView) -> str:
    """Plain text, at most 110 columns, ending without a newline."""
    blocks = [_title(view), _memory(view), _time(view), reasons(view.plan.decisions)]
    return "\n\n".join(blocks)


def _title(view: PlanView) -> str:
    cluster, job = view.plan.cluster, view.plan.job
    tokens, nodes = human_count(job.tokens_per_step), view.nodes.replace("×", "x")
    return "\n".join(
        [
            f"{view.plan.model.name}, {view.parameters} parameters, on {cluster.num_gpus} x {cluster.gpu.name} "
            f"({nodes})",
            f"{view.method}, {job.precision}, sequences of {job.seq_length}, {job.global_batch_size} a step "
            f"({tokens} tokens), "
            f"{run_length(view.plan)}",
            "",
            f"  {view.layout}",
        ]
    )


def _memory(view: PlanView) -> str:
    predicted, stages = view.plan.predicted, view.plan.predicted.memory
    shown = view.memory_gib
    learned = is_corrected(predicted) and " GiB" in predicted.step_time_evidence
    band = " (calibrated)" if learned else _band(predicted.memory_band)
    names = [f"stage {stage.stage}" if view.drawn else "" for stage in stages]
    rows = [f"  {name:<8}{cells(stage, shown)}" for name, stage in zip(names, stages, strict=True)]
    if len(rows) > _STAGES_SHOWN:
        rows[_STAGES_SHOWN - 1 : -1] = ["  …"]
    nodes = (("host memory", predicted.host_ram_gib_per_node), ("NVMe", predicted.nvme_gib_per_node))
    lines = [
        f"peak memory per GPU: {predicted.peak_gib:.1f} GiB of {view.limits}{band}",
        "  " + " " * 8 + "".join(f"{name:>12}" for name in [*shown, "peak"]),
        *rows,
        *(f"  {name} of a node: {gib:.0f} GiB" for name, gib in nodes if gib),
    ]
    return "\n".join(lines)


def _time(view: PlanView) -> str:
    plan = view.plan
    predicted, gpus = plan.predicted, plan.cluster.num_gpus
    days = predicted.days
    assert days is not None, "a view's plan has a length"
    took = human_seconds(days * SECONDS_PER_DAY)
    whole = f"{at_most(plan)}{took} for {run_length(plan)}; {money(plan.cluster, days)}"
    parts = [f"{name} {human_seconds(seconds)}" for name, seconds in view.shown_s.items()]
    lines = [
        *textwrap.wrap(
            f"step {human_seconds(predicted.step_time_s)}" + _speed_band(predicted), WIDTH, subsequent_indent="  "
        ),
        *textwrap.wrap(" + ".join(parts), WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"{human_count(predicted.tokens_per_s)} tokens/s, {human_count(predicted.tokens_per_s / gpus)} a GPU; "
        f"MFU {predicted.mfu:.1%}" + (f"; bubble {predicted.bubble_fraction:.1%}" if plan.layout.pp > 1 else ""),
        *textwrap.wrap(whole, WIDTH, subsequent_indent="  "),
    ]
    if plan.cluster.gpu.device == "cuda":
        lines.append(_operation(predicted.operation, predicted))
    return "\n".join(lines)


def _operation(operation: Operation, predicted: Prediction) -> str:
    data = operation.data_mbytes_per_s
    rate = f"{data:.2g} MB/s" if data >= 0.01 else f"{1e3 * data:.2g} kB/s"
    return (
        f"data loading: {rate} of tokens\n"
        f"checkpoint {operation.checkpoint_gb:,.0f} GB in {human_seconds(operation.checkpoint_s)}, "
        f"${operation.checkpoint_usd_per_month:,.2f} a month to store\n"
        f"save every {human_seconds(operation.checkpoint_interval_s)}; a failure every "
        f"{human_seconds(operation.hours_between_failures * 3600)}: goodput {operation.goodput:.1%}"
        f"{_in_all(predicted)}"
    )


def _in_all(predicted: Prediction) -> str:
    if not predicted.operation.goodput or predicted.total_days is None:
        return ""
    cost = "" if predicted.total_cost_usd is None else f", ${predicted.total_cost_usd:,.0f}"
    return f", {human_seconds(predicted.total_days * SECONDS_PER_DAY)} in total{cost}"


def _speed_band(predicted: Prediction) -> str:
    words = predicted.step_time_evidence or "not validated by measurements"
    if predicted.step_time_band is None:
        return f" (predicted; {words})"
    return f" (± {predicted.step_time_band:.0%}: {words})"


def _band(band: float | None) -> str:
    return "; prediction not validated by measurements" if band is None else f" (± {band:.0%})"


def reasons(decisions: tuple[Decision, ...]) -> str:
    """Each decision, and what was rejected for it."""
    lines = ["why"]
    for decision in decisions:
        head = f"  {decision.rule}={decision.chosen}: {decision.why}"
        lines += textwrap.wrap(head, WIDTH, subsequent_indent="      ")
        if decision.rejected:
            alternatives = "; ".join(decision.rejected) if len(decision.rejected) > 2 else "\n".join(decision.rejected)
            for alternative in alternatives.splitlines():
                lines += textwrap.wrap(
                    f"rejected {alternative}", WIDTH, initial_indent="      ", subsequent_indent="        "
                )
    return "\n".join(lines)

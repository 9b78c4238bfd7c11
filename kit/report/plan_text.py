"""A plan as text for a terminal: layout, memory, speed, cost and reasons."""

from __future__ import annotations

import math
import textwrap

from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import COMPONENTS
from kit.cost.model.params import count
from kit.cost.prediction import Operation, Prediction, StageMemory
from kit.planner.calibration import is_corrected
from kit.planner.describe import describe
from kit.planner.plan import Decision, Plan
from kit.specs.catalog import cheapest_node_with, node_names, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.units import SECONDS_PER_DAY, human_count, human_seconds

WIDTH = 110
_STAGES_SHOWN = 6


def render(plan: Plan) -> str:
    """Plain text, at most 110 columns, ending without a newline."""
    blocks = [_title(plan), _memory(plan), _time(plan), reasons(plan.decisions)]
    return "\n\n".join(blocks)


def _title(plan: Plan) -> str:
    model, cluster, job = plan.model, plan.cluster, plan.job
    tokens = human_count(job.tokens_per_step)
    nodes = f"{cluster.num_nodes} x {cluster.name}" if cluster.num_nodes > 1 else cluster.name
    size = human_count(count(model).total)
    return "\n".join(
        [
            f"{model.name}, {size} parameters, on {cluster.num_gpus} x {cluster.gpu.name} ({nodes})",
            f"{job.precision}, sequences of {job.seq_length}, {job.global_batch_size} a step ({tokens} tokens), "
            f"{run_length(plan)}",
            "",
            f"  {describe(plan.layout)}",
        ]
    )


def _memory(plan: Plan) -> str:
    gpu = plan.cluster.gpu
    shown = [name for name in COMPONENTS if any(stage.components_gib[name] >= 0.05 for stage in plan.predicted.memory)]
    limits = f"{usable_gib(gpu):.1f} usable ({gpu.memory_gib:.1f} total)"
    head = f"peak memory per GPU: {plan.predicted.peak_gib:.1f} GiB of {limits}"
    columns = "  " + " " * 8 + "".join(f"{name:>12}" for name in [*shown, "peak"])
    rows = [_stage_row(stage, shown, plan.layout.pp) for stage in _some(plan.predicted.memory)]
    learned = is_corrected(plan.predicted) and " GiB" in plan.predicted.step_time_evidence
    lines = [head + (" (calibrated)" if learned else _band(plan.predicted.memory_band)), columns, *rows]
    if len(plan.predicted.memory) > _STAGES_SHOWN:
        lines.insert(-1, "  …")
    if plan.predicted.host_ram_gib_per_node:
        lines.append(f"  host memory of a node: {plan.predicted.host_ram_gib_per_node:.0f} GiB")
    if plan.predicted.nvme_gib_per_node:
        lines.append(f"  NVMe of a node: {plan.predicted.nvme_gib_per_node:.0f} GiB")
    return "\n".join(lines)


def _some(stages: tuple[StageMemory, ...]) -> tuple[StageMemory, ...]:
    return stages if len(stages) <= _STAGES_SHOWN else (*stages[: _STAGES_SHOWN - 1], stages[-1])


def _stage_row(stage: StageMemory, shown: list[str], num_stages: int) -> str:
    name = f"stage {stage.stage}" if num_stages > 1 else ""
    values = [stage.components_gib[component] for component in shown] + [stage.peak_gib]
    return f"  {name:<8}" + "".join(f"{value:>12.1f}" for value in values)


def _time(plan: Plan) -> str:
    predicted, gpus = plan.predicted, plan.cluster.num_gpus
    parts = [
        f"{name.replace('_', ' ')} {human_seconds(seconds)}"
        for name, seconds in predicted.step_time_components_s.items()
        if seconds >= 0.001 * predicted.step_time_s
    ]
    lines = [
        *textwrap.wrap(
            f"step {human_seconds(predicted.step_time_s)}" + _speed_band(predicted), WIDTH, subsequent_indent="  "
        ),
        *textwrap.wrap(" + ".join(parts), WIDTH, initial_indent="  ", subsequent_indent="  "),
        f"{human_count(predicted.tokens_per_s)} tokens/s, {human_count(predicted.tokens_per_s / gpus)} a GPU; "
        f"MFU {predicted.mfu:.1%}" + (f"; bubble {predicted.bubble_fraction:.1%}" if plan.layout.pp > 1 else ""),
        *textwrap.wrap(_whole_run(plan), WIDTH, subsequent_indent="  "),
    ]
    if plan.cluster.gpu.device == "cuda":
        lines.append(_operation(predicted.operation, predicted))
    return "\n".join(lines)


def _whole_run(plan: Plan) -> str:
    days = plan.predicted.days
    if days is None:
        return unknown_length(plan)
    return f"{at_most(plan)}{human_seconds(days * SECONDS_PER_DAY)} for {run_length(plan)}; {money(plan.cluster, days)}"


def run_length(plan: Plan) -> str:
    """The length of the run in words: tokens, or epochs and the steps that are known."""
    job, steps = plan.job, plan.predicted.num_steps
    if (tokens := tokens_of(plan)) is not None:
        return f"{human_count(tokens)} tokens" + ("" if job.objective == "pretrain" else " in full sequences")
    known = None if steps is None else f"{round(steps):,} steps"
    if job.epochs is None:
        return known or "length not said"
    return f"{job.epochs:g} epochs" + (f", {known}" if known else "")


def tokens_of(plan: Plan) -> int | None:
    """Tokens for which days are predicted; None if days are of a number of steps, or not known."""
    tokens, steps = plan.job.planned_tokens, plan.predicted.num_steps
    same = tokens and steps and math.isclose(steps * plan.job.tokens_per_step, tokens, rel_tol=1e-6)
    return tokens if same else None


def at_most(plan: Plan) -> str:
    """A word before days of steps of rows, which are predicted for rows of seq_length."""
    return "" if plan.job.objective == "pretrain" or tokens_of(plan) else "at most "


def unknown_length(plan: Plan) -> str:
    """Why days and money are not predicted, and what they follow from."""
    job = plan.job
    if job.epochs is None:
        return "not said, and a run needs one: --epochs 3 or --total-tokens 5e8 (job.epochs, job.total_tokens)"
    a_day = SECONDS_PER_DAY / plan.predicted.step_time_s * job.global_batch_size
    return (
        f"days and cost follow from the number of {job.rows}, which the run counts: {human_count(a_day)} a day, and "
        f"more where they are shorter than {job.seq_length:,} tokens"
    )


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


def money(cluster: ClusterSpec, days: float) -> str:
    """The cost of a cluster for so many days, and its price. A cluster without a price, such as a DGX or a part of a
    catalog node, is priced per GPU as the cheapest catalog node with the same GPU, where one has a price.
    """
    if cluster.price_per_node_hour_usd is not None:
        hourly, node = cluster.price_per_node_hour_usd * cluster.num_nodes, cluster
        at = f"${cluster.price_per_node_hour_usd:,.2f} a node and hour"
    elif (cheapest := cheapest_node_with(cluster.gpu)) is not None:
        node, a_gpu = cheapest
        hourly, at = a_gpu * cluster.num_gpus, f"{node.name}'s ${a_gpu:,.2f} a GPU and hour"
    else:
        return _no_price(cluster)
    when = f", {node.price_date}" if node.price_date else ""
    own = "" if node is cluster else f" ({_no_price(cluster)})"
    return f"${hourly * 24 * days:,.0f} at {at}{when}{own}"


def _no_price(cluster: ClusterSpec) -> str:
    whole = parse_cluster(f"{cluster.name}:1") if cluster.name in node_names() else cluster
    if cluster.gpus_per_node < whole.gpus_per_node:
        return f"no price for {cluster.gpus_per_node} of the {whole.gpus_per_node} GPUs of a {cluster.name}"
    return f"no price is known for {cluster.name}"


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

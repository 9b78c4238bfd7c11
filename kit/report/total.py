"""Length and money of a whole run, in words."""

from __future__ import annotations

import math
from dataclasses import replace

from kit.planner.make_plan import for_steps
from kit.planner.plan import Plan
from kit.specs.catalog import cheapest_node_with, node_names, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.validation import changed
from kit.units import human_count

BILLION = 10**9
"""Tokens of which time and money are printed where a run's length is not known."""


def run_length(plan: Plan) -> str:
    """The length of the run in words: tokens, or epochs and the steps that are known."""
    job, steps = plan.job, plan.predicted.num_steps
    if (tokens := tokens_of(plan)) is not None:
        return f"{human_count(tokens)} tokens" + ("" if job.objective == "pretrain" else " in full sequences")
    known = "" if steps is None else f"{round(steps):,} steps"
    return known if job.epochs is None else f"{job.epochs:g} epochs, {known}"


def tokens_of(plan: Plan) -> int | None:
    """Tokens for which days are predicted; None if days are of a number of steps, or not known."""
    tokens, steps = plan.job.total_tokens, plan.predicted.num_steps
    same = tokens and steps and math.isclose(steps * plan.job.tokens_per_step, tokens, rel_tol=1e-6)
    return tokens if same else None


def at_most(plan: Plan) -> str:
    """A word before days of steps of rows, which are predicted for rows of seq_length."""
    return "" if plan.job.objective == "pretrain" or tokens_of(plan) else "at most "


def with_length(plan: Plan) -> Plan:
    """The plan; where its length is not known, that of a billion tokens."""
    if plan.predicted.days is not None:
        return plan
    job = of_a_billion(changed(plan.job, epochs=None))
    return for_steps(replace(plan, job=job), BILLION / job.tokens_per_step)


def of_a_billion(job: JobSpec) -> JobSpec:
    """The job; where nobody says how many tokens it has, with a billion."""
    return job if job.total_tokens is not None or job.epochs is not None else changed(job, total_tokens=BILLION)


def usd_per_hour(cluster: ClusterSpec) -> float | None:
    """The price of a cluster for an hour. One without a price, such as a DGX or a part of a catalog node, is priced per
    GPU as the cheapest catalog node with the same GPU; None where that has none."""
    if cluster.price_per_node_hour_usd is not None:
        return cluster.price_per_node_hour_usd * cluster.num_nodes
    cheapest = cheapest_node_with(cluster.gpu)
    return None if cheapest is None else cheapest[1] * cluster.num_gpus


def money(cluster: ClusterSpec, days: float) -> str:
    """The cost of a cluster for so many days, and its price (``usd_per_hour``)."""
    hourly, cheapest = usd_per_hour(cluster), cheapest_node_with(cluster.gpu)
    if hourly is None:
        return _no_price(cluster)
    if cluster.price_per_node_hour_usd is not None or cheapest is None:
        node, own, at = cluster, "", f"${cluster.price_per_node_hour_usd:,.2f} a node and hour"
    else:
        node, own = cheapest[0], f" ({_no_price(cluster)})"
        at = f"{node.name}'s ${cheapest[1]:,.2f} a GPU and hour"
    when = f", {node.price_date}" if node.price_date else ""
    return f"${hourly * 24 * days:,.0f} at {at}{when}{own}"


def _no_price(cluster: ClusterSpec) -> str:
    whole = parse_cluster(f"{cluster.name}:1") if cluster.name in node_names() else cluster
    if cluster.gpus_per_node < whole.gpus_per_node:
        return f"no price for {cluster.gpus_per_node} of the {whole.gpus_per_node} GPUs of a {cluster.name}"
    return f"no price is known for {cluster.name}"

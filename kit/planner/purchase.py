"""Which cluster to get: the smallest, cheapest or fastest that trains a token budget by a deadline, for a sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kit.cost.efficiency import peak_flops_per_s
from kit.cost.flops import model_flops_per_token
from kit.errors import PlanError, SpecError
from kit.planner.describe import describe
from kit.planner.weighing import search, step_s
from kit.specs.catalog import node_names, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec
from kit.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, human_seconds

Goal = Literal["gpus", "money", "time"]
HIGHEST_MFU = 0.65
"""No published run lies above; it bounds from below how many GPUs a deadline takes."""
MOST_GPUS = 16384


@dataclass(frozen=True)
class Wish:
    """What may be spent; null = no limit."""

    goal: Goal = "gpus"
    deadline_days: float | None = None
    budget_usd: float | None = None
    max_gpus: int | None = None


@dataclass(frozen=True)
class Offer:
    """A cluster that fulfils a wish."""

    cluster: ClusterSpec
    layout: Layout
    days: float
    cost_usd: float | None


def offers(model: ModelSpec, job: JobSpec, pins: Pins, wish: Wish, node: str | None = None) -> tuple[Offer, ...]:
    """The best number of nodes of each type (or of one), the best offer first.

    Powers of two of nodes, and three times those, are tried, from what the deadline needs at the
    highest MFU to what fits the limits. Raises ``PlanError`` with the nearest miss where none fulfils the wish.
    """
    if node is not None and node not in node_names():
        raise SpecError(f"node {node!r} is not in the catalog; use one of {', '.join(node_names())}")
    found, misses = [], []
    for name in [node] if node else _types(wish):
        offer, miss = _of_type(model, job, pins, wish, name)
        if offer is not None:
            found.append(offer)
        misses += [miss] if miss else []
    if not found:
        raise PlanError("\n".join(["no cluster of the catalog fulfils this", *misses[:3]]))
    return tuple(sorted(found, key=lambda offer: _rank(offer, wish.goal)))


def render_offers(chosen: Iterable[Offer]) -> str:
    """A table, one line a node type."""
    lines = [f"{'GPUs':>6}  {'cluster':32} {'days':>7} {'USD':>14}  layout"]
    for offer in chosen:
        money = "no price known" if offer.cost_usd is None else f"{offer.cost_usd:,.0f}"
        name = f"{offer.cluster.num_nodes} x {offer.cluster.name} ({offer.cluster.gpu.name})"
        lines.append(f"{offer.cluster.num_gpus:>6}  {name:32} {offer.days:>7.1f} {money:>14}  {describe(offer.layout)}")
    return "\n".join(lines)


def _types(wish: Wish) -> list[str]:
    types = [name for name in node_names() if parse_cluster(f"{name}:1").gpu.device == "cuda"]
    priced = [name for name in types if parse_cluster(f"{name}:1").price_per_node_hour_usd is not None]
    return priced if wish.goal == "money" or wish.budget_usd is not None else types


def _of_type(model: ModelSpec, job: JobSpec, pins: Pins, wish: Wish, name: str) -> tuple[Offer | None, str | None]:
    best: Offer | None = None
    miss: str | None = None
    for nodes in _numbers(model, job, wish, name):
        cluster = parse_cluster(f"{name}:{nodes}")
        found = search(model, cluster, job, pins).best
        if found is None:
            miss = f"{nodes} x {name}: does not fit, or no layout is legal"
            continue
        seconds = job.total_tokens / (job.global_batch_size * job.seq_length) * step_s(found)
        price = cluster.price_per_node_hour_usd
        offer = Offer(
            cluster=cluster,
            layout=found.layout,
            days=seconds / SECONDS_PER_DAY,
            cost_usd=None if price is None else price * nodes * seconds / SECONDS_PER_HOUR,
        )
        if wish.deadline_days is not None and offer.days > wish.deadline_days:
            miss = f"{nodes} x {name}: {human_seconds(seconds)}, after the deadline of {wish.deadline_days:g} days"
            continue
        if wish.budget_usd is not None and (offer.cost_usd is None or offer.cost_usd > wish.budget_usd):
            miss = f"{nodes} x {name}: ${offer.cost_usd or 0:,.0f}, above the budget of ${wish.budget_usd:,.0f}"
            continue
        if best is None or _rank(offer, wish.goal) < _rank(best, wish.goal):
            best = offer
        if wish.goal == "gpus":
            break
    return best, miss


def _numbers(model: ModelSpec, job: JobSpec, wish: Wish, name: str) -> list[int]:
    one = parse_cluster(f"{name}:1")
    limit = min(wish.max_gpus or MOST_GPUS, MOST_GPUS) // one.gpus_per_node
    if not one.inter_node_gbytes_per_s:
        limit = min(limit, 1)
    least = 1.0
    if wish.deadline_days is not None:
        flops = job.total_tokens * model_flops_per_token(model, job.seq_length)
        speed = one.num_gpus * peak_flops_per_s(one.gpu, job.precision) * HIGHEST_MFU
        least = flops / speed / (wish.deadline_days * SECONDS_PER_DAY)
    numbers = sorted(factor * 2**power for factor in (1, 3) for power in range(15))
    return [number for number in numbers if least <= number <= limit]


def _rank(offer: Offer, goal: Goal) -> tuple[float, float]:
    money = offer.cost_usd if offer.cost_usd is not None else float("inf")
    first = {"gpus": float(offer.cluster.num_gpus), "money": money, "time": offer.days}[goal]
    return first, offer.days

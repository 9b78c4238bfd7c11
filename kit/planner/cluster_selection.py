"""Selects the smallest, cheapest or fastest cluster that trains a token budget within a deadline and a cost limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from kit.cost.estimate import cost_usd
from kit.cost.hardware import peak_flops_per_s
from kit.cost.model.flops import model_flops_per_token
from kit.cost.reliability import operation
from kit.errors import PlanError, SpecError
from kit.planner.calibration import NONE, Calibration
from kit.planner.fallbacks import without_loss
from kit.planner.request import Request
from kit.planner.search import Candidate, search, step_s
from kit.planner.sweep import Variant, sweep
from kit.specs.catalog import node_names, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins, describe
from kit.specs.model import ModelSpec
from kit.specs.text import listed, nearest
from kit.specs.validation import cached
from kit.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, human_seconds

Goal = Literal["gpus", "money", "time"]
GOALS: tuple[Goal, ...] = ("gpus", "money", "time")
_HIGHEST_MFU = 0.65
"""Upper bound of the MFU, which no published run exceeds; gives the fewest GPUs for a deadline."""
_MOST_GPUS = 16384
_NUMBERS = sorted(factor * 2**power for factor in (1, 3) for power in range(15))
"""Numbers of nodes to try."""
_FARTHEST = 2.0
"""A node type is not listed if it takes this many times the GPUs, cost or time of the best option."""
_GIVE_UP = 3
"""The search of a node type ends after this many node counts in a row without an improvement."""
_MOST_MISSES = 3
"""Number of near misses in the error message if no cluster satisfies the constraints."""


class _Miss(NamedTuple):
    """Why a number of nodes does not satisfy the constraints."""

    times: float
    """How many times a limit is exceeded; infinite if no larger limit would help."""
    text: str


@dataclass(frozen=True)
class Constraints:
    """Limits of a cluster selection; None = no limit."""

    goal: Goal = "gpus"
    deadline_days: float | None = None
    budget_usd: float | None = None
    max_gpus: int | None = None

    def __post_init__(self) -> None:
        """Raises ``SpecError`` for a limit that is not a positive number."""
        for name in ("deadline_days", "budget_usd", "max_gpus"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(f"{name}={value:g} is not a limit; use a number above 0")

    def miss(self, name: str, days: float, usd: float, already: str = "") -> _Miss | None:
        """The first limit that so much time or money exceeds."""
        deadline, budget = self.deadline_days, self.budget_usd
        if deadline is not None and days > deadline:
            took = f"{human_seconds(days * SECONDS_PER_DAY)}{already}"
            return _Miss(days / deadline, f"{name}: {took}, after the deadline of {deadline:g} days")
        if budget is not None and usd > budget:
            return _Miss(usd / budget, f"{name}: ${usd:,.0f}{already}, above the budget of ${budget:,.0f}")
        return None


@dataclass(frozen=True)
class ClusterOption:
    """A cluster that satisfies the constraints."""

    cluster: ClusterSpec
    layout: Layout
    days: float
    """Days for the token budget, including checkpoints and failures (``kit.cost.reliability``)."""
    cost_usd: float | None


def node_type(text: str) -> str:
    """The node type of ``--gpus`` when kit chooses the number of nodes: ``aws:p5.48xlarge``, ``8xH100``.

    Raises ``SpecError`` for several nodes, or for a part of one.
    """
    cluster = parse_cluster(text)
    whole = parse_cluster(f"{cluster.name}:1") if cluster.name in node_names() else None
    if whole is None or cluster != whole:
        name = cluster.name if whole else f"such as {listed(node_names())}"
        raise SpecError(
            f"--gpus {text} is {cluster.num_nodes} x {cluster.gpus_per_node} GPUs, and with --deadline, --budget, "
            f"--max-gpus or --by their number is chosen: name a node type, {name}; --max-gpus bounds the number"
        )
    return cluster.name


def cluster_options(
    model: ModelSpec,
    job: JobSpec,
    pins: Pins,
    constraints: Constraints,
    node: str | None = None,
    calibration: Calibration = NONE,
) -> tuple[ClusterOption, ...]:
    """The best number of nodes of each node type (or of ``node`` alone), the best option first.

    Tries powers of two and three times powers of two, from the fewest nodes that meet the deadline at the highest MFU
    to the most that the limits allow. Skips node types that, even at the highest MFU, are much worse than the best
    option so far. Layouts count that lose no accuracy. Raises ``PlanError`` with the nearest misses if no cluster
    satisfies the constraints.
    """
    if node is not None and node not in node_names():
        raise SpecError(f"node {node!r} is not in the catalog; {nearest(node, node_names())}")
    if job.total_tokens is None:
        raise SpecError(
            "a cluster is chosen for the time or cost of so many tokens, and their number is not known; give "
            "--total-tokens"
        )
    asked = partial(Request, model=model, job=job, pins=without_loss(pins), calibration=calibration)
    types = [_NodeType(asked(cluster=parse_cluster(f"{name}:1")), constraints) for name in _types(constraints, node)]
    found: list[ClusterOption] = []
    misses: list[_Miss] = []
    searched: dict[ClusterSpec, Candidate | None] = {}
    for each in sorted(types, key=lambda each: (each.ideal, each.ideal_usd)):
        best = min((_rank(option, constraints.goal)[0] for option in found), default=math.inf)
        answer = each.best(_FARTHEST * best, searched)
        found += [answer] if isinstance(answer, ClusterOption) else []
        misses += [answer] if isinstance(answer, _Miss) else []
    if not found:
        closest = [miss.text for miss in sorted(misses)[:_MOST_MISSES]]
        raise PlanError("\n".join(["no cluster of the catalog satisfies this", *closest]))
    return tuple(sorted(found, key=lambda option: _rank(option, constraints.goal)))


def render_options(chosen: Iterable[ClusterOption]) -> str:
    """A text table with one line per node type."""
    lines = [f"{'GPUs':>6}  {'cluster':32} {'days':>7} {'USD':>14}  layout"]
    for option in chosen:
        money = "no price known" if option.cost_usd is None else f"{option.cost_usd:,.0f}"
        name = f"{option.cluster.num_nodes} x {option.cluster.name} ({option.cluster.gpu.name})"
        lines.append(
            f"{option.cluster.num_gpus:>6}  {name:32} {option.days:>7.1f} {money:>14}  {describe(option.layout)}"
        )
    return "\n".join(lines)


def _types(constraints: Constraints, only: str | None) -> list[str]:
    if only is not None:
        return [only]
    nodes = {name: parse_cluster(f"{name}:1") for name in node_names()}
    priced = constraints.goal == "money" or constraints.budget_usd is not None
    return [
        name
        for name, node in nodes.items()
        if node.gpu.device == "cuda" and not (priced and node.price_per_node_hour_usd is None)
    ]


@dataclass(frozen=True)
class _NodeType:
    """Nodes of one type under the constraints."""

    request: Request
    """On one node."""
    constraints: Constraints

    @cached
    def node_seconds(self) -> float:
        """Node seconds for the token budget at the highest MFU: a lower bound for every number of nodes."""
        job, node = self.request.job, self.request.cluster
        flops = model_flops_per_token(self.request.model, job.seq_length, frozen=job.lora is not None)
        speed = node.num_gpus * peak_flops_per_s(node.gpu, job.precision) * _HIGHEST_MFU
        return (job.total_tokens or 0) * flops / speed

    @property
    def ideal_usd(self) -> float:
        """Lower bound of the token budget's cost on this node type."""
        price = self.request.cluster.price_per_node_hour_usd
        return math.inf if price is None else price * self.node_seconds / SECONDS_PER_HOUR

    @property
    def ideal(self) -> float:
        """Lower bound of the goal's measure: no option of this node type is better."""
        numbers = self.numbers()
        if not numbers:
            return math.inf
        days = self.node_seconds / numbers[-1] / SECONDS_PER_DAY
        gpus = float(numbers[0] * self.request.cluster.gpus_per_node)
        return {"gpus": gpus, "money": self.ideal_usd, "time": days}[self.constraints.goal]

    def numbers(self) -> list[int]:
        """Numbers of nodes to try, ascending."""
        deadline = self.constraints.deadline_days
        least = 1.0 if deadline is None else self.node_seconds / (deadline * SECONDS_PER_DAY)
        return [number for number in _NUMBERS if least <= number <= self._most]

    @property
    def _most(self) -> int:
        """The most nodes that the limits and the fabric allow; 0 if not even one."""
        node = self.request.cluster
        nodes = min(self.constraints.max_gpus or _MOST_GPUS, _MOST_GPUS) // node.gpus_per_node
        return nodes if node.inter_node_gbytes_per_s else min(nodes, 1)

    def best(self, limit: float, searched: dict[ClusterSpec, Candidate | None]) -> ClusterOption | _Miss | None:
        """The best option, or the nearest miss; None if no option can stay within ``limit``."""
        constraints, goal, node, numbers = self.constraints, self.constraints.goal, self.request.cluster, self.numbers()
        already = f" at {_HIGHEST_MFU:.0%} MFU already"
        if (dear := constraints.miss(node.name, 0.0, self.ideal_usd, already)) is not None:
            return dear
        if self.ideal > limit:
            return None
        if not numbers:
            most = max(1, self._most)
            days = self.node_seconds / most / SECONDS_PER_DAY
            few = f"{node.name}: {node.num_gpus} GPUs a node, at most {constraints.max_gpus} wanted"
            return constraints.miss(f"{most} x {node.name}", days, 0.0, already) or _Miss(math.inf, few)
        best, worse = None, 0
        misses: list[_Miss] = []
        variants = (
            Variant(f"{nodes} x {node.name}", replace(self.request, cluster=replace(node, num_nodes=nodes)))
            for nodes in numbers[:: -1 if goal == "time" else 1]
            if goal != "gpus" or nodes * node.gpus_per_node <= limit
        )
        for outcome in sweep(variants, partial(self._option, searched)):
            found = outcome.found or _Miss(math.inf, outcome.why_none)
            if isinstance(found, _Miss):
                misses.append(found)
            elif best is None or _rank(found, goal) < _rank(best, goal):
                best, worse = found, 0
            else:
                worse += 1
            if worse == _GIVE_UP or (goal == "gpus" and best):
                break
        return best or min(misses, default=None)

    def _option(self, searched: dict[ClusterSpec, Candidate | None], variant: Variant) -> ClusterOption | _Miss:
        name, request = variant.label, variant.request
        job, cluster = request.job, request.cluster
        # Clusters that differ only in name, price and source share one best layout. Residuals depend on the name.
        known = cluster.name if request.calibration.residuals else ""
        same = replace(cluster, name=known, source="", price_per_node_hour_usd=None, price_date=None)
        if same not in searched:
            searched[same] = search(request).best
        if (found := searched[same]) is None:
            return _Miss(math.inf, f"{name}: does not fit without loss of accuracy, or no layout is legal")
        if not (goodput := operation(request.workload(found.layout), step_s(found)).goodput):
            return _Miss(math.inf, f"{name}: loses all its time to failures")
        days = (job.total_tokens or 0) / job.tokens_per_step * step_s(found) / goodput / SECONDS_PER_DAY
        cost = cost_usd(cluster, days)
        miss = self.constraints.miss(name, days, math.inf if cost is None else cost)
        return miss or ClusterOption(cluster, found.layout, days, cost)


def _rank(option: ClusterOption, goal: Goal) -> tuple[float, float]:
    money = option.cost_usd if option.cost_usd is not None else float("inf")
    first = {"gpus": float(option.cluster.num_gpus), "money": money, "time": option.days}[goal]
    return first, option.days

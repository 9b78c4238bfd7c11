"""Selects the smallest, cheapest or fastest cluster that trains a token budget within a deadline and a cost limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kit.cost.hardware import peak_flops_per_s
from kit.cost.model.flops import model_flops_per_token
from kit.cost.reliability import operation
from kit.cost.workload import Workload
from kit.errors import PlanError, SpecError
from kit.planner.calibration import NONE, Calibration
from kit.planner.describe import describe
from kit.planner.fallbacks import without_loss
from kit.planner.request import Request
from kit.planner.search import Candidate, search, step_s
from kit.specs.catalog import node_names, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec
from kit.specs.text import listed, nearest
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
    types = sorted(
        (
            _NodeType(model, job, without_loss(pins), constraints, name, calibration)
            for name in ([node] if node else _types(constraints))
        ),
        key=lambda each: (each.ideal, each.ideal_usd),
    )
    found: list[ClusterOption] = []
    misses: list[_Miss] = []
    searched: dict[ClusterSpec, Candidate | None] = {}
    for each in types:
        best = min((_rank(option, constraints.goal)[0] for option in found), default=math.inf)
        option, miss = each.best(_FARTHEST * best, searched)
        if option is not None:
            found.append(option)
        misses += [miss] if miss else []
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


def _types(constraints: Constraints) -> list[str]:
    types = [name for name in node_names() if parse_cluster(f"{name}:1").gpu.device == "cuda"]
    priced = [name for name in types if parse_cluster(f"{name}:1").price_per_node_hour_usd is not None]
    return priced if constraints.goal == "money" or constraints.budget_usd is not None else types


@dataclass(frozen=True, order=True)
class _Miss:
    """Why a number of nodes does not satisfy the constraints."""

    times: float
    """How many times a limit is exceeded; infinite if no larger limit would help."""
    text: str


class _NodeType:
    """Nodes of one type under the constraints."""

    def __init__(
        self, model: ModelSpec, job: JobSpec, pins: Pins, constraints: Constraints, name: str, calibration: Calibration
    ) -> None:
        self.model, self.job, self.pins, self.constraints, self.name, self.calibration = (
            model,
            job,
            pins,
            constraints,
            name,
            calibration,
        )
        self.node = parse_cluster(f"{name}:1")
        if job.total_tokens is None:
            raise SpecError(
                "a cluster is chosen for the time or cost of so many tokens, and their number is not known; give "
                "--total-tokens"
            )
        self.tokens = job.total_tokens
        flops = self.tokens * model_flops_per_token(model, job.seq_length, frozen=job.lora is not None)
        speed = self.node.num_gpus * peak_flops_per_s(self.node.gpu, job.precision) * _HIGHEST_MFU
        self.node_seconds = flops / speed
        """Node seconds for the token budget at the highest MFU: a lower bound for every number of nodes."""

    @property
    def ideal_usd(self) -> float:
        """Lower bound of the token budget's cost on this node type."""
        price = self.node.price_per_node_hour_usd
        return math.inf if price is None else price * self.node_seconds / SECONDS_PER_HOUR

    @property
    def ideal(self) -> float:
        """Lower bound of the goal's measure: no option of this node type is better."""
        numbers = self.numbers()
        if not numbers:
            return math.inf
        days = self.node_seconds / numbers[-1] / SECONDS_PER_DAY
        return {"gpus": float(numbers[0] * self.node.gpus_per_node), "money": self.ideal_usd, "time": days}[
            self.constraints.goal
        ]

    def numbers(self) -> list[int]:
        """Numbers of nodes to try, ascending."""
        deadline = self.constraints.deadline_days
        least = 1.0 if deadline is None else self.node_seconds / (deadline * SECONDS_PER_DAY)
        return [number for number in _NUMBERS if least <= number <= self._most]

    @property
    def _most(self) -> int:
        """The most nodes that the limits and the fabric allow; 0 if not even one."""
        nodes = min(self.constraints.max_gpus or _MOST_GPUS, _MOST_GPUS) // self.node.gpus_per_node
        return nodes if self.node.inter_node_gbytes_per_s else min(nodes, 1)

    def best(
        self, limit: float, searched: dict[ClusterSpec, Candidate | None]
    ) -> tuple[ClusterOption | None, _Miss | None]:
        """(best option, None), or (None, the nearest miss); (None, None) if no option can stay within ``limit``."""
        constraints, goal = self.constraints, self.constraints.goal
        if constraints.budget_usd is not None and self.ideal_usd > constraints.budget_usd:
            cost = f"${self.ideal_usd:,.0f} at {_HIGHEST_MFU:.0%} MFU already"
            text = f"{self.name}: {cost}, above the budget of ${constraints.budget_usd:,.0f}"
            return None, _Miss(self.ideal_usd / constraints.budget_usd, text)
        if self.ideal > limit:
            return None, None
        best, worse = None, 0
        misses: list[_Miss] = []
        numbers = self.numbers()
        if not numbers:
            return None, self._too_few()
        for nodes in reversed(numbers) if goal == "time" else numbers:
            if worse == _GIVE_UP or (goal == "gpus" and nodes * self.node.gpus_per_node > limit):
                break
            found, reason = self._option(nodes, searched)
            misses += [reason] if reason else []
            if found is None:
                continue
            if best is None or _rank(found, goal) < _rank(best, goal):
                best, worse = found, 0
            else:
                worse += 1
            if goal == "gpus":
                break
        return best, min(misses, default=None)

    def _too_few(self) -> _Miss:
        """The miss if even the most nodes allowed are too slow at the highest MFU."""
        constraints = self.constraints
        most = max(1, self._most)
        if constraints.deadline_days is None:
            return _Miss(
                math.inf, f"{self.name}: {self.node.num_gpus} GPUs a node, at most {constraints.max_gpus} wanted"
            )
        days = self.node_seconds / most / SECONDS_PER_DAY
        took = f"{human_seconds(days * SECONDS_PER_DAY)} at {_HIGHEST_MFU:.0%} MFU already"
        text = f"{most} x {self.name}: {took}, after the deadline of {constraints.deadline_days:g} days"
        return _Miss(days / constraints.deadline_days, text)

    def _option(
        self, nodes: int, searched: dict[ClusterSpec, Candidate | None]
    ) -> tuple[ClusterOption | None, _Miss | None]:
        constraints, cluster = self.constraints, parse_cluster(f"{self.name}:{nodes}")
        # Clusters that differ only in name, price and source share one best layout. Residuals depend on the name.
        name = cluster.name if self.calibration.residuals else ""
        same = dataclasses.replace(cluster, name=name, source="", price_per_node_hour_usd=None, price_date=None)
        if same not in searched:
            request = Request(
                model=self.model, cluster=cluster, job=self.job, pins=self.pins, calibration=self.calibration
            )
            searched[same] = search(request).best
        found = searched[same]
        if found is None:
            return None, _Miss(
                math.inf, f"{nodes} x {self.name}: does not fit without loss of accuracy, or no layout is legal"
            )
        workload = Workload(model=self.model, cluster=cluster, job=self.job, layout=found.layout)
        goodput = operation(workload, step_s(found)).goodput
        if not goodput:
            return None, _Miss(math.inf, f"{nodes} x {self.name}: loses all its time to failures")
        steps = self.tokens / self.job.tokens_per_step
        seconds = steps * step_s(found) / goodput
        price = cluster.price_per_node_hour_usd
        option = ClusterOption(
            cluster=cluster,
            layout=found.layout,
            days=seconds / SECONDS_PER_DAY,
            cost_usd=None if price is None else price * nodes * seconds / SECONDS_PER_HOUR,
        )
        if constraints.deadline_days is not None and option.days > constraints.deadline_days:
            late = f"{human_seconds(seconds)}, after the deadline of {constraints.deadline_days:g} days"
            return None, _Miss(option.days / constraints.deadline_days, f"{nodes} x {self.name}: {late}")
        if constraints.budget_usd is not None and (option.cost_usd is None or option.cost_usd > constraints.budget_usd):
            cost = math.inf if option.cost_usd is None else option.cost_usd
            dear = f"${cost:,.0f}, above the budget of ${constraints.budget_usd:,.0f}"
            return None, _Miss(cost / constraints.budget_usd, f"{nodes} x {self.name}: {dear}")
        return option, None


def _rank(option: ClusterOption, goal: Goal) -> tuple[float, float]:
    money = option.cost_usd if option.cost_usd is not None else float("inf")
    first = {"gpus": float(option.cluster.num_gpus), "money": money, "time": option.days}[goal]
    return first, option.days

"""Types and numbers of nodes (kit/planner/cluster_selection): bounds, goals, limits, and options in order."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from kit.cost.hardware import peak_flops_per_s
from kit.cost.model.flops import model_flops_per_token
from kit.cost.reliability import operation
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner import cluster_selection
from kit.planner.cluster_selection import ClusterOption, Constraints, render_options
from kit.planner.request import Request
from kit.planner.sweep import Variant
from kit.specs.layout import Pins, describe
from kit.units import human_seconds
from tests.planning.questions import M, candidate
from tests.planning.shapes import DENSE, Rows, by_hand
from tests.support.models import cluster, job, megatron
from tests.support.refusals import refusal


def node(goal: Any = "gpus", name: str = "p4d.24xlarge", tokens: int = 10**12, **limits: Any) -> Any:
    """Nodes of a type under constraints."""
    asked = Request(model=DENSE, cluster=cluster(f"{name}:1"), job=job(seq_length=1024, total_tokens=tokens))
    return cluster_selection._NodeType(asked, Constraints(goal=goal, **limits))


A100 = cluster("p4d.24xlarge:1")
NODE_S = 1e12 * model_flops_per_token(DENSE, 1024) / (8 * peak_flops_per_s(A100.gpu, "bf16") * 0.65)
"""Seconds of one node at an MFU of 0.65."""


PRICE = A100.price_per_node_hour_usd or 0.0
DAYS = NODE_S / 86400
NUMBERS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]


def best_of(goal: Any, times: dict[int, float | None], limit: float = math.inf, **limits: Any) -> list[Any]:
    """(nodes or the words of a miss, nodes that were searched), where so many nodes take so long."""
    each, asked = node(goal, **limits), []

    def option(_: Any, variant: Variant) -> Any:
        asked.append(nodes := variant.request.cluster.num_nodes)
        days = times.get(nodes, 1e3)
        if days is None:
            return cluster_selection._Miss(1.0 / nodes, f"{nodes} miss")
        return ClusterOption(replace(A100, num_nodes=nodes), M, days, days * nodes)

    object.__setattr__(each, "_option", option)
    found = each.best(limit, {})
    return [getattr(found, "text", None) or (found and found.cluster.num_nodes), asked]


SEARCHED = replace(A100, num_nodes=4, name="", source="", price_per_node_hour_usd=None, price_date=None)
CLUSTERS: Rows = [
    ("numbers of nodes", lambda: [node(**limits).numbers() for limits in ({}, {"max_gpus": 100}, {"max_gpus": 7},
        {"deadline_days": DAYS / 5})],
     [NUMBERS, [1, 2, 3, 4, 6, 8, 12], [], [each for each in NUMBERS if each >= 5]]),
    ("a node without a fabric", lambda: node(name="workstation-rtx-4090").numbers(), [1]),
    ("lower bounds", lambda: [node(each, max_gpus=100, deadline_days=DAYS / 2.5).ideal for each in ("gpus", "money",
        "time")],
     [24, PRICE * NODE_S / 3600, DAYS / 12]),
    ("no number is possible", lambda: node(max_gpus=7).ideal, math.inf),
    ("cost of no price", lambda: node(name="dgx-h100").ideal_usd, math.inf),
    # The fewest that will do; the cheapest until three in a row are no better; the fastest from the most on.
    ("the fewest", lambda: best_of("gpus", {1: None, 2: None, 3: 5.0}), [3, [1, 2, 3]]),
    ("no more than twice the best", lambda: best_of("gpus", {}, limit=8.0, max_gpus=64), [1, [1]]),
    ("beyond the best", lambda: best_of("gpus", dict.fromkeys(NUMBERS), limit=24.0), ["3 miss", [1, 2, 3]]),
    ("the cheapest", lambda: best_of("money", {1: 10.0, 2: 6.0, 3: 3.0, 4: 9.0, 6: 9.0, 8: 9.0}), [3, [1, 2, 3, 4,
        6, 8]]),
    ("the fastest", lambda: best_of("time", {8: 3.0, 6: 1.0, 4: 2.0, 3: 5.0, 2: 5.0}, max_gpus=64), [6, [8, 6, 4,
        3, 2]]),
    ("hopeless", lambda: best_of("time", {}, limit=DAYS / 3000), [None, []]),
    ("too dear at best", lambda: best_of("gpus", {}, budget_usd=1.0), [
        f"p4d.24xlarge: ${PRICE * NODE_S / 3600:,.0f} at 65% MFU already, above the budget of $1", []]),
    ("too few at best", lambda: best_of("gpus", {}, max_gpus=16, deadline_days=DAYS / 4), [
        f"2 x p4d.24xlarge: {human_seconds(NODE_S / 2)} at 65% MFU already, "
         f"after the deadline of {DAYS / 4:g} days", []]),
    ("a part of a node", lambda: best_of("gpus", {}, max_gpus=7, deadline_days=DAYS / 4)[0],
     f"1 x p4d.24xlarge: {human_seconds(NODE_S)} at 65% MFU already, after the deadline of {DAYS / 4:g} days"),
    ("at a limit, and beyond it", lambda: [bool(Constraints(deadline_days=2.0, budget_usd=9.0).miss("a", days, usd))
        for days, usd in ((2.0, 9.0), (2.01, 9.0), (2.0, 9.01))], [False, True, True]),
    ("too few GPUs", lambda: best_of("gpus", {}, max_gpus=7), ["p4d.24xlarge: 8 GPUs a node, at most 7 wanted",
        []]),
    ("order of options", lambda: [cluster_selection._rank(ClusterOption(A100, M, 3.0, each), goal) for goal, each in (
        ("gpus", 9.0), ("money", 9.0), ("money", None), ("time", 9.0))], [(8, 3), (9, 3), (math.inf, 3), (3, 3)]),
    ("types with a price", lambda: [("dgx-h100" in cluster_selection._types(each, None),
        "p4d.24xlarge" in cluster_selection._types(each, None)) for each in (
        Constraints(), Constraints(goal="money"), Constraints(budget_usd=9.0))], [(True, True), (False, True), (False,
        True)]),
    ("a table", lambda: render_options([ClusterOption(replace(A100, num_nodes=4), M, 3.25, None), ClusterOption(A100, M,
        1.0, 1234.0)]).splitlines()[1:],
     [f"{32:>6}  {'4 x p4d.24xlarge (A100-40)':32} {'3.2':>7} {'no price known':>14}  {describe(M)}",
      f"{8:>6}  {'1 x p4d.24xlarge (A100-40)':32} {'1.0':>7} {'1,234':>14}  {describe(M)}"]),
]  # fmt: skip


test_value = by_hand(CLUSTERS)


@pytest.mark.parametrize(
    ("found", "limits", "said"),
    [
        (candidate(2.0, layout=megatron(dp=32)), {}, ""),
        (
            candidate(2.0, layout=megatron(dp=32)),
            {"deadline_days": 1.0},
            "4 x p4d.24xlarge: {took}, after the deadline of 1 days",
        ),
        (
            candidate(2.0, layout=megatron(dp=32)),
            {"budget_usd": 1.0},
            "4 x p4d.24xlarge: ${cost:,.0f}, above the budget of $1",
        ),
        (None, {}, "4 x p4d.24xlarge: does not fit without loss of accuracy, or no layout is legal"),
        (candidate(1e12, layout=megatron(dp=32)), {}, "4 x p4d.24xlarge: loses all its time to failures"),
    ],
    ids=["found", "late", "dear", "nothing fits", "failures"],
)
def test_an_option_has_the_days_and_the_cost_of_its_step(found: Any, limits: dict[str, float], said: str) -> None:
    each = node(**limits)
    at = replace(A100, num_nodes=4)
    option = each._option({SEARCHED: found}, Variant("4 x p4d.24xlarge", replace(each.request, cluster=at)))
    seconds = 1e12 / (128 * 1024) * 2.0 / operation(Workload(DENSE, at, each.request.job, megatron(dp=32)), 2.0).goodput
    cost = PRICE * 4 * seconds / 3600
    if not said:
        assert (option.days, option.cost_usd) == (pytest.approx(seconds / 86400), pytest.approx(cost))
        assert (option.cluster, option.layout) == (at, megatron(dp=32))
        return
    assert option.text == said.format(took=human_seconds(seconds), cost=cost)
    times = {"deadline_days": seconds / 86400, "budget_usd": cost}.get(next(iter(limits), ""), math.inf)
    assert option.times == pytest.approx(times)


def test_types_are_searched_from_the_best_bound_on_and_sorted_by_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told twice the best that was found before it."""
    nodes = {name: replace(A100, name=name) for name in ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge")}
    usd = {"p4d.24xlarge": 9.0, "p4de.24xlarge": 4.0, "p5.48xlarge": 6.0}
    asked: list[tuple[str, float]] = []

    def best(self: Any, limit: float, searched: Any) -> Any:
        name = self.request.cluster.name
        assert self.request.pins.optimizer_state_dtype == "fp32"  # no option loses accuracy
        asked.append((name, limit))
        miss = cluster_selection._Miss(usd[name], f"{name} misses")
        return ClusterOption(nodes[name], M, 1.0, usd[name]) if usd[name] < 9 else miss

    monkeypatch.setattr(cluster_selection, "_types", lambda *_: list(nodes))
    monkeypatch.setattr(cluster_selection._NodeType, "best", best)
    ask = (DENSE, job(seq_length=1024, total_tokens=10**12), Pins(), Constraints(goal="money"))
    found = cluster_selection.cluster_options(*ask)
    order = sorted(nodes, key=lambda name: node("money", name).ideal_usd)
    prices = [usd[name] if usd[name] < 9 else math.inf for name in order]
    best_before = accumulate(prices, min, initial=math.inf)
    assert asked == [(name, 2 * best) for name, best in zip(order, best_before, strict=False)]
    assert [option.cost_usd for option in found] == [4.0, 6.0]
    usd |= {"p4de.24xlarge": 19.0, "p5.48xlarge": 12.0}
    assert re.search(
        r"(?s)satisfies this\np4d\.24xlarge misses\np5\.48xlarge misses\np4de",
        refusal(PlanError, cluster_selection.cluster_options, *ask),
    )

"""Choosing a cluster: what --gpus may name, what the time of a run is, and how near the nearest misses are."""

from __future__ import annotations

import pytest

from kit.cost.reliability import operation
from kit.errors import PlanError, SpecError
from kit.planner.cluster_selection import Constraints, cluster_options, node_type
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model
from kit.specs.layout import Pins
from tests.support.models import job

MODEL = load_model("llama-3.1-8b")


@pytest.mark.parametrize("text", ["p5.48xlarge", "aws:p5.48xlarge", "p5.48xlarge:1"])
def test_a_node_type_as_clusters_are_written(text: str) -> None:
    assert node_type(text) == "p5.48xlarge"
    assert node_type("8xH100") == "dgx-h100"


@pytest.mark.parametrize("text", ["p5.48xlarge:4", "64xH100", "4xH100"])
def test_a_number_of_nodes_or_a_part_of_one_is_no_type(text: str) -> None:
    with pytest.raises(SpecError, match=r"their number is chosen: name a node type, (p5.48xlarge|dgx-h100)"):
        node_type(text)


def test_days_and_money_are_with_what_failures_take() -> None:
    tokens = job(total_tokens=10**12, global_batch_size=512)
    (offer,) = cluster_options(MODEL, tokens, Pins(engine="megatron"), Constraints(max_gpus=64), "p5.48xlarge")
    plan = make_plan(MODEL, offer.cluster, tokens, Pins(engine="megatron"))
    goodput = operation(plan.workload, plan.predicted.step_time_s).goodput
    assert goodput < 0.999
    assert offer.days == pytest.approx(plan.predicted.days / goodput)
    assert plan.predicted.cost_usd is not None
    assert offer.cost_usd == pytest.approx(plan.predicted.cost_usd / goodput)


def test_the_nearest_misses_come_first() -> None:
    with pytest.raises(PlanError) as refused:
        cluster_options(MODEL, job(total_tokens=10**10), Pins(), Constraints(budget_usd=1000.0))
    costs = [int(line.split("$")[1].split()[0].replace(",", "")) for line in str(refused.value).splitlines()[1:]]
    assert len(costs) == 3
    assert costs == sorted(costs)


def test_a_deadline_that_no_number_of_nodes_meets_says_how_near_the_best_came() -> None:
    with pytest.raises(PlanError) as refused:
        cluster_options(MODEL, job(total_tokens=10**12), Pins(), Constraints(deadline_days=0.01))
    misses = str(refused.value).splitlines()[1:]
    assert len(misses) == 3
    assert all("at 65% MFU already, after the deadline of 0.01 days" in miss for miss in misses)

"""``kit plan --clusters``: one job on several clusters, with days, money and prices that the user gives; and what
--gpus may name where the cluster is chosen."""

from __future__ import annotations

import dataclasses
import re

import pytest

import kit
from kit.cost.reliability import operation
from kit.errors import PlanError, SpecError
from kit.planner.cluster_selection import Constraints, cluster_options, node_type
from kit.planner.make_plan import make_plan
from kit.report.clusters import clusters_named
from kit.specs.catalog import load_model
from kit.specs.layout import Pins
from tests.support import ROOT
from tests.support.models import job
from tests.support.refusals import refusal

MODEL, NAMES = "qwen2.5-0.5b", ["8xH100", "aws:p5.48xlarge:2", "1xT4"]
LLAMA = load_model("llama-3.1-8b")


def test_each_cluster_has_the_plan_that_kit_plan_chooses() -> None:
    answers = kit.compare_clusters(MODEL, clusters_named(NAMES, ["aws:p5.48xlarge:2=30"]))
    assert [each.cluster for each in answers] == NAMES
    for each in answers[:2]:
        billion = kit.JobSpec(total_tokens=10**9)  # where nobody says how many
        plan, priced = kit.plan(MODEL, each.cluster, billion), each.price_per_node_hour_usd
        cost = priced and pytest.approx(priced * 2 * 24 * (plan.predicted.total_days or 0))
        assert dataclasses.astuple(each)[1:] == (
            plan.cluster.num_gpus, priced, dataclasses.astuple(plan.layout), plan.predicted.peak_gib,
            plan.predicted.tokens_per_s, plan.predicted.mfu, plan.predicted.total_days, cost, 10**9, None,
        )  # fmt: skip
    assert [each.price_per_node_hour_usd for each in answers[:2]] == [None, 30.0]
    assert (answers[2].layout, "bf16" in str(answers[2].why_none)) == (None, True)
    (lossy,) = kit.compare_clusters("llama-3.1-405b", clusters_named(["8xH100"]), None, Pins(engine="deepspeed"))
    why = str(lossy.why_none)
    assert ("does not fit" in why, "it fits with" in why, "compared" in why) == (True, False, False)
    recipe = kit.load_recipe(ROOT / "recipes/llama-3.1-8b-sft-fsdp2-8xh100.yaml")
    (answer,) = kit.compare_clusters(recipe, clusters_named(["8xH200"]))
    assert answer.layout == kit.plan(recipe.model, "8xH200", recipe.job, recipe.layout).layout


def test_one_price_is_of_all_clusters_and_a_spot_price_is_one_clusters() -> None:
    listed, spot = (clusters_named(["aws:p5.48xlarge:1", "8xH100"], prices) for prices in ([], ["7", "8xH100=8.5"]))
    first, last = spot.values()
    assert (first.price_per_node_hour_usd, last.price_per_node_hour_usd, first.price_date) == (7.0, 8.5, None)
    assert listed["aws:p5.48xlarge:1"].price_per_node_hour_usd == pytest.approx(2 * 27.52)
    assert clusters_named(["8xH100"], ["1e6"])["8xH100"].price_per_node_hour_usd == 1e6


@pytest.mark.parametrize(
    ("names", "prices", "says"),
    [
        (["8xH100", "8xH100"], [], "named twice"),
        (["8xH100"], ["8xA100-80=3"], "not among the clusters 8xH100"),
        (["8xH100"], ["8xH100=cheap"], "'cheap' is no price"),
        (["8xH100"], ["-1"], "'-1' is no price"),
        (["8xH100"], ["0"], "'0' is no price"),
        (["8xH100"], ["1000001"], "'1000001' is no price"),
        (["8xH100"], ["nan"], "'nan' is no price"),
        (["8xNothing"], [], "GPU 'Nothing'"),
        (["8xH100", ""], [], "not understood"),
    ],
)
def test_a_bad_cluster_or_price_is_an_error(names: list[str], prices: list[str], says: str) -> None:
    assert says in refusal(SpecError, clusters_named, names, prices)


@pytest.mark.parametrize("text", ["p5.48xlarge", "aws:p5.48xlarge", "p5.48xlarge:1"])
def test_a_node_type_as_clusters_are_written(text: str) -> None:
    assert (node_type(text), node_type("8xH100")) == ("p5.48xlarge", "dgx-h100")


@pytest.mark.parametrize("text", ["p5.48xlarge:4", "64xH100", "4xH100"])
def test_a_number_of_nodes_or_a_part_of_one_is_no_type(text: str) -> None:
    assert re.search(
        r"their number is chosen: name a node type, (p5.48xlarge|dgx-h100)", refusal(SpecError, node_type, text)
    )


def test_days_and_money_are_with_what_failures_take() -> None:
    tokens = job(total_tokens=10**12, global_batch_size=512)
    (offer,) = cluster_options(LLAMA, tokens, Pins(engine="megatron"), Constraints(max_gpus=64), "p5.48xlarge")
    plan = make_plan(LLAMA, offer.cluster, tokens, Pins(engine="megatron"))
    goodput = operation(plan.workload, plan.predicted.step_time_s).goodput
    assert goodput < 0.999
    assert offer.days == pytest.approx(plan.predicted.days / goodput)
    assert plan.predicted.cost_usd is not None
    assert offer.cost_usd == pytest.approx(plan.predicted.cost_usd / goodput)


@pytest.mark.parametrize(
    ("tokens", "wish", "said"),
    [
        (10**10, Constraints(budget_usd=1000.0, max_gpus=16), "$"),
        (10**12, Constraints(deadline_days=0.01), "at 65% MFU already, after the deadline of 0.01 days"),
    ],
)
def test_the_nearest_misses_come_first(tokens: int, wish: Constraints, said: str) -> None:
    misses = refusal(PlanError, cluster_options, LLAMA, job(total_tokens=tokens), Pins(), wish).splitlines()[1:]
    assert (len(misses), all(said in miss for miss in misses)) == (3, True)
    costs = [int(miss.split("$")[1].split()[0].replace(",", "")) for miss in misses if said == "$"]
    assert costs == sorted(costs)

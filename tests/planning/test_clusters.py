"""``kit plan --clusters``: one job on several clusters, with days, money and prices that the user gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

import kit
from kit.cli.answers import json_schema
from kit.cli.app import app
from kit.errors import SpecError
from kit.report.clusters import ClusterAnswer, cluster_table, clusters_named

MODEL, NAMES = "qwen2.5-0.5b", ["8xH100", "aws:p5.48xlarge:2", "1xT4"]


def test_each_cluster_has_the_plan_that_kit_plan_chooses() -> None:
    answers = kit.compare_clusters(MODEL, clusters_named(NAMES, ["aws:p5.48xlarge:2=30"]))
    assert [each.cluster for each in answers] == NAMES
    for each in answers[:2]:
        plan = kit.plan(MODEL, each.cluster)
        assert (each.layout, each.num_gpus) == (plan.layout, plan.cluster.num_gpus)
        assert each.days == plan.predicted.total_days >= plan.predicted.days
    assert (answers[0].price_per_node_hour_usd, answers[0].cost_usd) == (None, None)
    assert answers[1].days is not None
    assert answers[1].cost_usd == pytest.approx(30 * 2 * 24 * answers[1].days)
    assert answers[2].layout is None
    assert "bf16" in str(answers[2].why_none)


def test_one_price_is_of_all_clusters_and_a_spot_price_halves_the_cost() -> None:
    listed, half = (
        kit.compare_clusters(MODEL, clusters_named(["aws:p5.48xlarge:1"], prices))[0] for prices in ([], ["27.52"])
    )
    assert listed.price_per_node_hour_usd == pytest.approx(2 * 27.52)
    assert listed.cost_usd is not None
    assert half.cost_usd == pytest.approx(listed.cost_usd / 2)
    assert listed.days == half.days
    both = clusters_named(["8xH100", "4xA100-80"], ["7"])
    assert [each.price_per_node_hour_usd for each in both.values()] == [7, 7]


@pytest.mark.parametrize(
    ("names", "prices", "says"),
    [
        (["8xH100", "8xH100"], [], "named twice"),
        (["8xH100"], ["8xA100-80=3"], "not among the clusters 8xH100"),
        (["8xH100"], ["8xH100=cheap"], "'cheap' is no price"),
        (["8xH100"], ["-1"], "'-1' is no price"),
        (["8xH100"], ["nan"], "'nan' is no price"),
        (["8xNothing"], [], "GPU 'Nothing'"),
        (["8xH100", ""], [], "not understood"),
    ],
)
def test_a_bad_cluster_or_price_is_an_error(names: list[str], prices: list[str], says: str) -> None:
    with pytest.raises(SpecError) as error:
        clusters_named(names, prices)
    assert says in str(error.value)


def test_the_table_fits_80_columns() -> None:
    answers = kit.compare_clusters("llama-3-70b", clusters_named([*NAMES, "16x8xB200", "gcp:a3-megagpu-8g:64"]))
    huge = ClusterAnswer(
        cluster="/a/long/path/to/the/file/of/our/own/cluster.yaml", num_gpus=16384, price_per_node_hour_usd=99999.99,
        layout=answers[-1].layout, peak_gib=179.9, mfu=0.999, days=99999.9, cost_usd=99_999_999_999.0,
    )  # fmt: skip
    text = cluster_table([*answers, huge])
    assert max(map(len, text.splitlines())) <= 80
    assert "fastest: " in text
    assert "cheapest: " in text


def test_the_command_and_its_json() -> None:
    run = CliRunner().invoke
    done = run(app, ["plan", MODEL, "--clusters", ",".join(NAMES), "--price", "8xH100=20", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert TypeAdapter(list[ClusterAnswer]).validate_python(rows, strict=False)
    assert rows[0]["price_per_node_hour_usd"] == 20
    assert json_schema()["commands"]["plan --clusters"]["type"] == "array"
    for args, says in (
        (["--clusters", "8xH100", "--gpus", "8xH100"], "no plan"),
        (["--clusters", "8xH100", "--deadline", "3"], "no plan"),
        (["--price", "3", "--by", "money"], "--gpus or --clusters"),
    ):
        refused = run(app, ["plan", MODEL, *args])
        assert refused.exit_code != 0
        assert says in str(refused.exception or "") + refused.output
    done = run(app, ["plan", MODEL, "--gpus", "8xH100", "--price", "20"])
    assert "$20.00 a node and hour" in done.output
    assert "--price 20 --save" in done.output


def test_a_recipe_is_compared_with_its_own_job() -> None:
    recipe = kit.load_recipe(Path("recipes/llama-3.1-8b-sft-fsdp2-8xh100.yaml"))
    (answer,) = kit.compare_clusters(recipe, clusters_named(["8xH200"]))
    assert answer.layout == kit.plan(recipe.model, "8xH200", recipe.job, recipe.layout).layout

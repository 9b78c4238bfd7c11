"""What the page of ``kit ui`` shows, without a browser: states and links, answers, charts, time."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

import kit
from kit.addons.ui import charts
from kit.addons.ui.answer import Answer, ClusterCost, answer, cluster_cost, pareto_front, plan_with, with_gpus
from kit.addons.ui.state import State, _packed, offer
from kit.emit.run_directory import files_of
from kit.errors import KitError, SpecError
from kit.planner.compare import compare
from kit.planner.request import Request
from kit.planner.search import search
from kit.specs.catalog import cluster_called, load_model, model_called
from kit.specs.huggingface import config_from_model
from kit.specs.job import JobSpec
from kit.specs.layout import describe
from kit.specs.shipped import recipe_names, recipe_path
from tests.support import ROOT
from tests.support.files import files_in
from tests.support.refusals import refusal

PIPELINE = State((("model", "llama-3.1-70b"), ("cluster", "64xH100"), ("layout.pp", "4")))


def answered(state: State) -> Answer:
    return answer(state.recipe({}), state.pin)


@pytest.mark.parametrize(
    "state",
    [
        State(),
        State((("model", "gpt2"), ("cluster", "1xA100-80"), ("job.lora", "{four_bit: true}"))),
        State((("cluster", "8xH100"),), text="model: llama-3.2-1b\njob: {seq_length: 1024}  # ü\n"),
        State(pin="torch, dp=8, DDP, micro batch 1 x 64"),
    ],
)
def test_a_link_holds_the_state(state: State) -> None:
    assert State.of_query(parse_qsl(state.query())) == state


def test_a_change_drops_the_pin_and_an_empty_value_takes_a_change_back() -> None:
    state = State(pin="x").having("job.seq_length", "8192").having("layout.engine", "torch")
    assert (state.get("job.seq_length"), state.pin) == ("8192", "")
    assert state.having("layout.engine", "").changes == (*State().changes, ("job.seq_length", "8192"))


def test_an_answer_is_the_plan_of_the_python_interface() -> None:
    found = answered(State())
    assert found.plan == kit.plan("llama-3.1-8b", "8xH100")
    assert found.comparison == kit.compare("llama-3.1-8b", "8xH100")
    assert found.files == files_of(found.plan)
    with zipfile.ZipFile(io.BytesIO(found.archive())) as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == found.files
    assert found.report().startswith("<!doctype html>")


def test_every_layout_that_the_search_considered_is_a_point_that_can_be_pinned() -> None:
    request = Request(model=load_model("llama-3.1-8b"), cluster=cluster_called("8xH100"), job=JobSpec())
    found, considered = compare(request), search(request).considered
    assert len({each.name for each in found.layouts}) == len(found.layouts)
    assert [(each.layout, each.peak_gib, each.step_time_s if each.fits else None) for each in found.layouts] == [
        (each.layout, each.peak_gib, each.step_time_s) for each in considered
    ]
    for each in (each for each in found.layouts[::23] if each.fits):
        plan = plan_with(found, each.name)
        assert (describe(plan.layout), plan.predicted.step_time_s, plan.predicted.peak_gib) == (
            each.name, pytest.approx(each.step_time_s), pytest.approx(each.peak_gib),
        )  # fmt: skip
    too_large = next(each.name for each in found.layouts if not each.fits)
    assert [
        said in answered(State(pin=pin)).refused
        for pin, said in ((too_large, "GiB"), ("../../etc/passwd", "pin another"))
    ] == [True] * 2


def test_a_chart_has_a_point_a_layout_that_is_near() -> None:
    found = answered(PIPELINE)
    compared, drawn = found.comparison.layouts, charts.layouts(found)
    points = [point for series in drawn["series"][:3] for point in series["data"]]
    fitting = sum(point["itemStyle"]["opacity"] == 0.75 for point in points)
    assert (len(points), fitting) == (len(compared), sum(each.fits for each in compared))
    assert [series.get("silent", False) for series in drawn["series"]] == [False] * 3 + [True] * 2, (
        "a click pins a point"
    )
    assert f"{len(points)} layouts, {fitting} of them fit: " in drawn["aria"]["label"]["description"]
    times, peaks = zip(*((each.step_time_s, each.peak_gib) for each in compared), strict=True)
    assert max(point["value"][0] for point in points) == min(max(times), 4 * min(times))
    assert max(point["value"][1] for point in points) == min(max(peaks), 2 * found.recipe.cluster.gpu.memory_gib)
    assert len(drawn["series"][3]["data"]) == len(pareto_front(found.comparison.layouts))
    chosen = found.plan.predicted
    assert drawn["series"][4]["data"] == [[chosen.step_time_s, pytest.approx(chosen.peak_gib)]]


def test_a_schedule_is_drawn_and_every_chart_is_said_in_words() -> None:
    found = answered(PIPELINE)
    memory, step, schedule = charts.memory(found.view), charts.step(found), charts.schedule(found)
    assert memory["yAxis"]["data"] == schedule["yAxis"]["data"] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert sum(len(series["data"]) for series in schedule["series"]) == len(found.schedule())
    assert [series["name"] for series in schedule["series"]] == [
        "forward", "forward, second chunk", "backward", "backward, second chunk",
    ]  # fmt: skip
    assert schedule["series"][0]["data"][0] == {"name": "forward of micro batch 1 on stage 0", "value": [0, 0, 1]}
    predicted = found.plan.predicted
    assert f"of 4 pipeline stages; each is idle for {predicted.bubble_fraction:.1%}" in str(schedule["aria"])
    assert f"fullest GPU: {predicted.peak_gib:.1f} of 75.1 GiB" in str(memory["aria"])
    assert min(len(chart["aria"]["label"]["description"]) for chart in (memory, step, schedule)) > 40
    json.dumps([memory, step, schedule], allow_nan=False)


def of_sizes(cluster: str) -> tuple[list[int], list[ClusterCost]]:
    """GPUs of the sizes beside a cluster, and the cost of a billion tokens there, for nobody says how many."""
    recipe = State((("model", "llama-3.2-1b"), ("cluster", cluster))).recipe(
        {"mine": {"cluster": {"gpu": "H200", "gpus_per_node": 1, "intra_node_gbytes_per_s": 450}}}
    )
    sizes = answer(recipe).cluster_sizes()
    return [each.num_gpus for each in sizes], [*filter(None, (cluster_cost(recipe, each) for each in sizes[:2]))]


def test_days_and_cost_of_other_sizes_are_those_of_their_plans() -> None:
    """Nodes without a fabric are no cluster."""
    sizes, costs = of_sizes("aws:p4d.24xlarge:2")
    assert (sizes, of_sizes("mine")[0]) == ([8, 16, 32, 64], [1])
    for cost, nodes in zip(costs, (1, 2), strict=True):
        predicted = kit.plan("llama-3.2-1b", f"aws:p4d.24xlarge:{nodes}", JobSpec(total_tokens=10**9)).predicted
        assert cost.cost_usd == pytest.approx((predicted.cost_usd or 0) / predicted.operation.goodput)
    assert [point["name"] for point in charts.cost(costs)["series"][0]["data"]] == ["8 GPUs", "16 GPUs"]
    sizes, (_, cost) = of_sizes("8xH100")  # has no price: as the text below the plan, that of the cheapest node
    assert (sizes, cost.cost_usd) == ([2, 4, 8, 16, 32], pytest.approx(4 * 55.04 / 8 * 24 * cost.days))
    assert of_sizes("16384xH100")[0] == [4096, 8192, 16384]


def test_cost_is_money_where_a_price_is_known_and_days_of_gpus_elsewhere() -> None:
    days = {8: 12.0, 16: 6.5}
    free = charts.cost(ClusterCost(num_gpus=gpus, days=days[gpus], cost_usd=None) for gpus in (16, 8))
    half = charts.cost(
        ClusterCost(num_gpus=gpus, days=days[gpus], cost_usd=usd) for gpus, usd in ((8, None), (16, 99.5))
    )
    assert [point["value"] for point in free["series"][0]["data"]] == [[12.0, 96.0], [6.5, 104.0]]
    assert [point["value"] for point in half["series"][0]["data"]] == [[6.5, 99.5]]
    assert (free["yAxis"]["name"], half["yAxis"]["name"]) == ("GPU-days; no price is known", "USD")
    assert "8 GPUs 12.0 days, 96 GPU-days; no price is known, 16 GPUs 6.5 days, 104" in str(free["aria"])
    assert "8 GPUs 12.0 days, 16 GPUs 6.5 days, 100 USD" in str(half["aria"])


def test_what_changed_since_the_last_choice() -> None:
    before, now = answered(State()), answered(State().having("job.seq_length", "8192"))
    assert before.changed_since(None) == before.changed_since(before.plan) == []
    rows = {row["what"]: row for row in now.changed_since(before.plan)}
    assert {"step", "MFU", "peak GiB", "tokens/s a GPU"} <= set(rows)
    assert rows["MFU"]["now"] == f"{now.plan.predicted.mfu:.1%}"


@pytest.mark.parametrize(
    ("cluster", "number", "found"),
    [
        ("8xH100", 64, "64xH100"),
        ("2x4xH100", 16, "16xH100"),
        ("aws:p5.48xlarge:4", 16, "aws:p5.48xlarge:2"),
        ("p5.48xlarge", 1, "p5.48xlarge:1"),
        ("8xH100", 12, None),
        ("../cluster.yaml", 8, None),
    ],
)
def test_a_number_of_gpus_changes_the_cluster(cluster: str, number: int, found: str | None) -> None:
    assert with_gpus(cluster, number) == found


# ---------------------------------------------------------------- what is pasted, and what is wrong


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b"])
def test_a_pasted_config_gives_its_model(name: str) -> None:
    config = json.dumps(config_from_model(load_model(name)))
    state = State((("model", "gpt2"), ("cluster", "16xH200"), ("job.seq_length", "2048"), ("layout.tp", "2")))
    assert (
        kit.memory(state.pasting(config).recipe({})).peak_gib
        == kit.memory(name, "16xH200", JobSpec(seq_length=2048)).peak_gib
    )


@pytest.mark.parametrize("name", recipe_names()[::5])
def test_a_pasted_recipe_gives_its_plan_without_its_run(name: str) -> None:
    text = recipe_path(name).read_text(encoding="utf-8")
    if "extends:" in text:
        assert "extends names a file" in refusal(SpecError, State((), text).recipe, {})
    else:
        recipe, known = State().pasting(text).recipe({}), kit.load_recipe(recipe_path(name))
        assert (recipe.model, recipe.cluster, recipe.job, recipe.layout, recipe.run) == (
            known.model, known.cluster, known.job, known.layout, None,
        )  # fmt: skip


def test_files_named_at_start_are_offered_by_their_names(tmp_path: Path) -> None:
    files_in(tmp_path, {
        "my-model/config.json": json.dumps(config_from_model(load_model("llama-3.2-1b"))),
        "mine.yaml": "model: my-model\ncluster: 16xH100\njob: {seq_length: 2048}\nlayout: {tp: 2}\n",
        "ours.yaml": "{gpu: H100, gpus_per_node: 4, intra_node_gbytes_per_s: 450, inter_node_gbytes_per_s: 50, "
        "num_nodes: 2}\n",
    })  # fmt: skip
    offered = offer([tmp_path / "my-model", tmp_path / "mine.yaml", tmp_path / "ours.yaml"])
    assert list(offered) == ["my-model", "mine.yaml", "ours.yaml"]
    recipe = State((("model", "mine.yaml"),)).recipe(offered)
    assert (recipe.cluster.num_gpus, recipe.job.seq_length, recipe.layout.tp) == (16, 2048, 2)
    recipe = State((("model", "my-model"), ("cluster", "ours.yaml"))).recipe(offered)
    assert (recipe.model.name, recipe.cluster.num_gpus) == ("my-model", 8)


WRONG = {
    "model=nonsense-9b&cluster=8xH100": "not in the catalog|neither in the catalog",
    "model=../my-model&cluster=8xH100": "neither in the catalog",
    "model=llama-3.1-8b&cluster=cluster.yaml": "is not understood",
    "model=llama-3.1-8b&cluster=local": "is not understood",
    "model=llama-3.1-8b&cluster=9xH100": "not whole nodes",
    "model=llama-3.1-8b&cluster=8xH100&job.seq_length=abc": "job.seq_length='abc'",
    "model=llama-3.1-8b&cluster=8xH100&job.seq=1": "unknown key; ",
    "model=llama-3.1-8b&cluster=8xH100&run.data.train=/etc/passwd": "",
    "model=llama-3.1-8b&cluster=8xH100&extends=/etc/passwd": "extends names a file",
    "model=llama-3.1-8b&model=gpt2": "use each key once",
    "model=" + "x" * 3000: "at most 2000",
    "text=%%%": "cut off",
    "text=eJwL": "damaged|cut off",
    "text=AAAA": "damaged",
    "cluster=8xH100": "model: is required and missing",
}


@pytest.mark.parametrize("query", WRONG)
def test_a_wrong_link_says_what_is_wrong_and_reads_no_file(
    query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.dumps(config_from_model(load_model("llama-3.2-1b")))
    files_in(tmp_path, dict.fromkeys(("my-model/config.json", "here/llama-3.1-8b/config.json"), config))
    (tmp_path / "here" / "cluster.yaml").write_text("{node: p5.48xlarge}")
    monkeypatch.chdir(tmp_path / "here")
    if WRONG[query]:
        assert re.search(WRONG[query], refusal(KitError, lambda: State.of_query(parse_qsl(query)).recipe({})))
    else:
        recipe = State.of_query(parse_qsl(query)).recipe({})
        # not that of the directory of this name
        assert (recipe.run, recipe.model) == (None, model_called("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a list where a mapping"),
        ('{"model_type": "bert"}', "kit ui DIRECTORY"),
        ('{"model_type": "llama"}', "lacks num_hidden_layers"),
        ("{" * 5000, "not valid JSON"),
        ("model: llama-3.1-8b\ncluster: 8xH100\njob: {seq_length: -1}\n", "pasted text:3: job.seq_length=-1"),
        ("model: ./x\ncluster: 8xH100\n", "pasted text:1: model"),
        ("a" * (1 << 21), "paste at most"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(text: str, part: str) -> None:
    assert part in refusal(SpecError, State().pasting(text).having("cluster", "8xH100").recipe, {})


def test_a_text_that_no_link_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=60_000))
    assert "characters of the link" in refusal(SpecError, State((), "# " + noise).query)
    assert len(State.of_query(parse_qsl(State((), "x" * (1 << 20)).query())).text) == 1 << 20
    beyond = base64.urlsafe_b64encode(zlib.compress(b"x" * (1 << 24))).decode()
    assert "longer than" in refusal(SpecError, State.of_query, [("text", beyond)])
    packed = _packed("model: gpt2")
    monkeypatch.setattr("kit.addons.ui.state.MOST_OF_A_LINK", len(packed))
    assert _packed("model: gpt2") == packed
    monkeypatch.setattr("kit.addons.ui.state.MOST_OF_A_LINK", len(packed) - 1)
    assert f"at most {len(packed) - 1} fit" in refusal(SpecError, _packed, "model: gpt2")


# ---------------------------------------------------------------- time and imports


def test_neither_the_command_line_nor_an_answer_imports_nicegui() -> None:
    code = "import sys, kit.cli, kit.addons.ui.answer, kit.addons.ui.command; sys.exit('nicegui' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

"""Plans as files and as text."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.cost.hardware import usable_gib
from kit.errors import SpecError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import search
from kit.report.first_screen import first_screen
from kit.report.plan_text import WIDTH, render
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Pins
from tests.support.models import job


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_model("llama-3.1-8b"), parse_cluster("p4d.24xlarge:4"), job(), Pins())


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert Plan.load(tmp_path / "plan.yaml").to_yaml() == (tmp_path / "plan.yaml").read_text()


def test_a_plan_is_never_overwritten(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    with pytest.raises(SpecError, match="not overwritten"):
        plan.save(tmp_path / "plan.yaml")


def test_the_hash_is_of_what_decides_the_run(plan: Plan) -> None:
    explained = dataclasses.replace(plan, decisions=())
    other = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, recompute="full"))
    assert explained.digest == plan.digest
    assert other.digest != plan.digest


@pytest.mark.parametrize(
    ("old", "new", "said"), [("tp: ", "tq: ", "tq"), ("schema_version: 3", "schema_version: 1", "plan again")]
)
def test_a_damaged_file_is_refused(plan: Plan, tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan.to_yaml().replace(old, new, 1))
    with pytest.raises(SpecError, match=said):
        Plan.load(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("name", "machines"), [("llama-3.1-8b", "8xH100"), ("llama-3-70b", "64xA100-80"), ("llama-3.1-8b", "1xH100")]
)
def test_the_text_shows_what_matters_and_fits_a_terminal(name: str, machines: str) -> None:
    plan = make_plan(load_model(name), parse_cluster(machines), job(), Pins())
    text = render(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"{plan.predicted.peak_gib:.1f} GiB of" in text
    assert f"MFU {plan.predicted.mfu:.1%}" in text
    for decision in plan.decisions:
        assert f"{decision.rule}={decision.chosen}" in text


@pytest.mark.parametrize("width", [60, WIDTH])
@pytest.mark.parametrize(
    ("name", "machines", "asked", "pins", "layout"),
    [
        (
            "llama-3.1-8b",
            "8xH100",
            {},
            {"engine": "megatron", "tp": 2},
            "core TP 2 + sequence parallel · DP 4",
        ),
        ("llama-3-70b", "64xA100-80", {}, {"engine": "torch", "tp": 8}, "PyTorch TP 8 · DP 8, FSDP2"),
        ("gpt2-xl", "1xTitan-RTX", {"seq_length": 1024, "precision": "fp16"}, {"zero_stage": 3}, "DeepSpeed ZeRO-3 · "),
    ],
)
def test_the_first_screen_is_short(
    name: str, machines: str, asked: dict[str, Any], pins: dict[str, Any], layout: str, width: int
) -> None:
    plan = make_plan(load_model(name), parse_cluster(machines), job(**asked), Pins(**pins))
    lines = first_screen(plan, ("kit explain",), width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= (15 if width == WIDTH else 24)
    joined = " ".join(" ".join(lines).split())
    assert layout in joined
    for part in (
        f"{plan.predicted.peak_gib:.1f} of {usable_gib(plan.cluster.gpu):.1f} GiB usable",
        f"MFU {plan.predicted.mfu:.1%}",
        "tokens/s",
        "100B tok",
        "next kit explain",
    ):
        assert part in joined


def test_the_next_command_emits_the_plan_on_the_screen(tmp_path: Path) -> None:
    recipe = shutil.copy("recipes/llama-2-13b-pretrain-tp-fsdp2-16xh100.yaml", tmp_path / "my recipe.yaml")
    command = [sys.executable, "-m", "kit", "plan", str(recipe), "layout.micro_batch_size=1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "400"})
    (emit,) = (line for line in shown.stdout.splitlines() if " kit emit " in line)
    arguments = shlex.split(emit.removeprefix("  next").strip())
    assert arguments == ["kit", "emit", str(recipe), "layout.micro_batch_size=1", "--out", "runs/a"]


def test_the_bar_is_the_share_of_the_gpu(plan: Plan) -> None:
    bar = next(line for line in first_screen(plan).splitlines() if "memory" in line).split()[1]
    assert bar.count("█") / len(bar) == pytest.approx(plan.predicted.peak_gib / plan.cluster.gpu.memory_gib, abs=0.02)


def test_runners_up_are_as_much_slower_as_their_steps(plan: Plan) -> None:
    free = make_plan(load_model("llama-3.1-8b"), parse_cluster("8xH100"), job())
    considered = search(Request(model=free.model, cluster=free.cluster, job=free.job)).considered
    others = [each.step_time_s for each in considered if each.layout.engine == "deepspeed" and each.step_time_s]
    behind = min(others) / free.predicted.step_time_s - 1
    (line,) = [line for line in first_screen(free).splitlines() if line.startswith("  also")]
    assert re.search(rf"DeepSpeed .*{re.escape(f'{behind:+.1%}')}", line)


def test_a_long_pipeline_is_shortened_in_the_middle() -> None:
    plan = make_plan(load_model("llama-3-70b"), parse_cluster("64xA100-80"), job(), Pins(engine="megatron", pp=16))
    text = render(plan)
    assert "stage 0" in text
    assert "stage 15" in text
    assert "stage 10" not in text
    assert "…" in text


def test_a_price_is_shown_with_its_date(plan: Plan) -> None:
    assert "$21.96 a node and hour, 2026-07-28" in render(plan)

"""Plans as files, and the first screen of plans that were searched."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.cli import app
from kit.errors import SpecError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.report.plan_text import render
from kit.report.summary import summary
from kit.report.view import WIDTH, view_of
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Pins
from tests.support import ROOT
from tests.support.files import file_with
from tests.support.models import job
from tests.support.refusals import refusal


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(load_model("llama-3.1-8b"), parse_cluster("p4d.24xlarge:4"), job(), Pins())


def test_a_plan_survives_its_file_which_is_never_overwritten(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    plan.save(file)
    assert Plan.load(file) == plan
    assert Plan.load(file).to_yaml() == file.read_text()
    assert "not overwritten" in refusal(SpecError, plan.save, file)
    assert "cannot be written: No such file" in refusal(SpecError, plan.save, tmp_path / "none" / "plan.yaml")


def test_the_hash_is_of_what_decides_the_run(plan: Plan) -> None:
    explained = dataclasses.replace(plan, decisions=())
    other = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, recompute="full"))
    assert explained.digest == plan.digest
    assert other.digest != plan.digest


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tp: ", "tq: ", "tq"),
        ("schema_version: 3", "schema_version: 2", "plan again"),
        ("schema_version: 3", f"schema_version: {[*range(9999)]}", "plan again"),
    ],
)
def test_a_damaged_file_is_refused(plan: Plan, tmp_path: Path, old: str, new: str, said: str) -> None:
    assert re.search(
        said, refusal(SpecError, Plan.load, file_with(tmp_path / "plan.yaml", plan.to_yaml().replace(old, new, 1)))
    )


@pytest.mark.parametrize(
    ("name", "machines", "pins"),
    [
        ("llama-3.1-8b", "8xH100", Pins(engine="megatron", tp=2)),
        ("llama-3-70b", "64xA100-80", Pins(engine="torch", tp=8)),
        ("gpt2", "1xTitan-RTX", Pins(zero_stage=3)),
    ],
)
def test_the_first_screen_is_short_and_no_text_is_too_wide(name: str, machines: str, pins: Pins) -> None:
    asked = {"seq_length": 1024, "precision": "fp16"} if name == "gpt2" else {}
    plan = make_plan(load_model(name), parse_cluster(machines), job(**asked), pins)
    assert max(map(len, render(view_of(plan)).splitlines())) <= WIDTH
    for width, most in ((60, 24), (WIDTH, 15)):
        lines = summary(view_of(plan), ("kit explain",), width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= most


def test_the_next_command_emits_the_plan_on_the_screen(tmp_path: Path) -> None:
    own = shutil.copy(ROOT / "recipes/llama-2-13b-pretrain-tp-fsdp2-16xh100.yaml", tmp_path / "my recipe.yaml")
    shown = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["plan", str(own), "layout.micro_batch_size=1"]).stdout
    (emit,) = (line for line in shown.splitlines() if " kit emit " in line)
    arguments = shlex.split(emit.removeprefix("  next").strip())
    assert arguments == ["kit", "emit", str(own), "layout.micro_batch_size=1", "--out", "runs/a"]

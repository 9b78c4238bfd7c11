"""``kit memory``: the plan's own figures where it fits, the nearest miss and ways out where it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kit.errors import PlanError
from kit.planner.memory_report import memory_report, render_memory
from kit.planner.search import make_plan
from kit.specs.catalog import load_model
from kit.specs.layout import Pins
from tests.planning.examples import cluster, job

MODEL = load_model("llama-3.1-8b")


def test_what_fits_is_what_a_plan_says() -> None:
    report = memory_report(MODEL, cluster("8xH100"), job(), Pins())
    plan = make_plan(MODEL, cluster("8xH100"), job(), Pins())
    assert report.layout == plan.layout
    assert report.stages == plan.predicted.memory
    assert report.verdict in ("fits", "tight")
    assert report.changes == ()


def test_what_does_not_fit_is_shown_with_ways_out() -> None:
    pins = Pins(engine="deepspeed", zero_stage=0, offload_optimizer="none", offload_param="none")
    report = memory_report(MODEL, cluster("8xH100"), job(), pins)
    assert report.verdict == "does not fit"
    assert report.peak_gib > report.usable_gib
    assert any("zero_stage" in change for change in report.changes)
    assert report.binding == "optimizer"
    assert "it fits with" in render_memory(report)


def test_each_stage_has_a_row_and_a_bar() -> None:
    report = memory_report(MODEL, cluster("8xH100"), job(), Pins(engine="megatron", pp=4))
    rows = [line for line in render_memory(report).splitlines() if "#" in line]
    assert len(rows) == len(report.stages) == 4


def test_impossible_pins_list_every_rule() -> None:
    with pytest.raises(PlanError, match="num_attention_heads") as caught:
        memory_report(MODEL, cluster("8xH100"), job(), Pins(engine="megatron", tp=3))
    assert len(str(caught.value).splitlines()) > 2


def test_the_command_prints_json() -> None:
    words = [sys.executable, "-m", "kit", "memory", "llama-3.1-8b", "--gpus", "8xH100", "--json"]
    printed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert printed["peak_gib"] == pytest.approx(
        max(sum(size for name, size in stage.items() if name != "stage") for stage in printed["stages"])
    )

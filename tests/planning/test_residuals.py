"""Residuals of real runs: what they correct, what they are carried to, and what is not a measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kit.errors import SpecError
from kit.planner import calibration
from kit.planner.calibration import Calibration
from kit.planner.cluster_selection import Constraints, cluster_options
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.layout import Pins
from tests.support.files import file_with
from tests.support.models import job
from tests.support.refusals import refusal

MODEL, CLUSTER = load_model("llama-3.1-8b"), parse_cluster("8xH100")


def plan_of(known: Calibration = calibration.NONE, pins: Pins | None = None) -> Plan:
    return make_plan(MODEL, CLUSTER, job(), pins, known)


def learned(plan: Plan, folder: Path, **measured: Any) -> Calibration:
    return calibration.learn(plan, file_with(folder / "measured.json", json.dumps(measured)), calibration.NONE)


def test_a_run_slower_than_predicted_does_not_send_the_search_to_what_never_ran(tmp_path: Path) -> None:
    """The split of a node by Megatron and by ZeRO over it are predicted alike; only one was measured. Memory of one
    engine says nothing of another's."""
    plan, on_torch = plan_of(), Pins(engine="torch")
    known = learned(plan, tmp_path, measured_step_time_s=1.4 * plan.predicted.step_time_s)
    assert plan_of(known).layout == plan.layout
    for pins in (None, on_torch):
        found, uncorrected = plan_of(known, pins).predicted, plan_of(pins=pins).predicted
        assert found.step_time_s == pytest.approx(1.4 * uncorrected.step_time_s)
        assert found.peak_gib == uncorrected.peak_gib
    assert "calibrated by 1 run of megatron local, bf16, dense" in found.step_time_evidence
    assert not calibration.is_corrected(make_plan(MODEL, parse_cluster("8xH200"), job(), None, known).predicted)


def test_clusters_are_chosen_with_the_correction(tmp_path: Path) -> None:
    plan, pins = make_plan(MODEL, parse_cluster("p5.48xlarge:1"), job()), Pins(engine="megatron")
    known = learned(plan, tmp_path, measured_step_time_s=2 * plan.predicted.step_time_s)
    constraints, tokens = Constraints(max_gpus=8), job(total_tokens=10**10)
    (slow,) = cluster_options(MODEL, tokens, pins, constraints, "p5.48xlarge", known)
    (fast,) = cluster_options(MODEL, tokens, pins, constraints, "p5.48xlarge")
    assert slow.days == pytest.approx(2 * fast.days, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"measured_step_time_s": -1.0}, "measured_step_time_s=-1.0 is not a measurement"),
        ({"measured_step_time_s": "fast"}, "is not a measurement"),
        ({"measured_step_time_s": "x" * 9999}, "is not a measurement"),
        ({"measured_step_time_s": True}, "is not a measurement"),
        ({"measured_memory_gib": float("inf")}, "is not a measurement"),
        ({"measured_step_time_s": 1e9}, "a run of another plan"),
        ({"measured_memory_gib": 500.0}, "a run of another plan"),
        ({"step_time_s": 1.0}, "neither measured_step_time_s"),
    ],
)
def test_what_is_no_measurement_of_the_plan_is_refused(measured: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert re.search(words, refusal(SpecError, learned, plan_of(), tmp_path, **measured))


@pytest.mark.parametrize(
    "text", ["kind: {step_time_factor: -1, extra_gib: 0, runs: 1}", "kind: {}", "[1]", "kind: 3", "a: [b"]
)
def test_a_damaged_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = file_with(tmp_path / "kept.yaml", text)
    assert "kept.yaml cannot be read as calibration" in refusal(SpecError, calibration.load, path)

"""A run's own summary corrects the next plan of its kind: written by the loop, read by ``kit plan --calibrate``."""

from __future__ import annotations

import dataclasses
import platform

import pytest
import yaml
from typer.testing import CliRunner

from kit.cli import app
from kit.cost.reliability import STORAGE_USD_PER_GB_MONTH
from kit.planner.plan import Plan
from tests.support import small_run as small
from tests.support.alone import process_group_of_one
from tests.support.assets import RECIPE
from tests.training import runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with a checkpoint every second."""
    out = tmp_path_factory.mktemp("finished") / "run"
    rundir = small.emit(out, "run.steps=4", "run.checkpoint.every_steps=2", seq_length=32)
    with process_group_of_one():
        runs.run(rundir)
    return rundir


def test_a_summary_measures_what_was_predicted(finished):
    rundir, summary = finished, runs.summary(finished)
    assert summary.device == (platform.processor() or platform.machine()) != ""
    root, predicted = rundir.path / "checkpoints", rundir.plan.predicted
    whole, last = (sum(p.stat().st_size for p in at.rglob("*") if p.is_file()) for at in (root, root / "step-00000004"))
    one_gib = predicted.operation.checkpoint_gb * 1e9 / 2**30
    expected = {
        "predicted_checkpoint_gib": one_gib,
        "predicted_storage_gib": 2 * one_gib,
        "measured_checkpoint_gib": (last - (root / "step-00000004" / "manifest.json").stat().st_size) / 2**30,
        "measured_storage_gib": whole / 2**30,
        "measured_storage_usd_per_month": whole / 1e9 * STORAGE_USD_PER_GB_MONTH,
    }
    assert {name: getattr(summary, name) for name in expected} == pytest.approx(expected)
    said = summary.predicted_checkpoint_s, summary.predicted_peak_gib, summary.predicted_step_time_s
    assert said == (predicted.operation.checkpoint_s, predicted.peak_gib, predicted.step_time_s)
    stalls = [row["checkpoint_s"] for row in runs.steps(rundir) if row["checkpoint_s"] is not None]
    assert summary.measured_checkpoint_s == pytest.approx(sum(stalls) / 2)
    found = {
        "measured_step_time_s": 0.5,
        "predicted_step_time_s": 0.25,
        "measured_memory_gib": 2.0,
        "measured_memory_is": "peak",
        "predicted_peak_gib": 1.5,
        "measured_checkpoint_gib": None,
        "measured_checkpoint_s": 3.0,
        "predicted_checkpoint_s": None,
        "measured_storage_gib": 1234.0,
        "predicted_storage_gib": 1000.0,
        "measured_storage_usd_per_month": 1234.5,
        "predicted_storage_usd_per_month": 0.001,
    }
    assert dataclasses.replace(summary, **found).beside_prediction() == (
        "measured: step 500 ms (predicted 250 ms), peak 2 GiB (predicted 1.5 GiB), checkpoint stall 3 s, "
        "checkpoints kept 1.23e+03 GiB (predicted 1e+03 GiB), a month of them $1,234.50 (predicted $0.001)"
    )


def test_the_summary_of_a_run_corrects_the_next_plan(finished, tmp_path):
    kept = tmp_path / "calibration.yaml"
    words = ["plan", str(RECIPE), "cluster=1xcpu", "layout.engine=torch", "layout.zero_stage=0"]

    def planned(name, *more):
        done = CliRunner().invoke(app, [*words, "--save", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
        return Plan.load(tmp_path / name).predicted

    before = planned("before.yaml")
    after = planned("after.yaml", "--calibrate", str(finished.path / "summary.json"), "--calibration", str(kept))
    later = planned("later.yaml", "--calibration", str(kept))
    factor = runs.summary(finished).measured_step_time_s / finished.plan.predicted.step_time_s
    (residual,) = yaml.safe_load(kept.read_text()).values()
    assert residual["step_time_factor"] == pytest.approx(factor)
    assert residual["extra_gib"] == 0, "what a CPU process holds is no GPU's peak"
    assert "calibrated by 1 run" in after.step_time_evidence
    assert after.step_time_s == later.step_time_s == pytest.approx(factor * before.step_time_s)
    assert planned("without.yaml").step_time_s == before.step_time_s, "a calibration is handed in, not found"

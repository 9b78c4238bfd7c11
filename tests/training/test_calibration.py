"""A run's own summary corrects the next plan of its kind: written by the loop, read by ``kit plan --calibrate``."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from kit.cli import app
from kit.planner.plan import Plan
from tests.support import small_run as small
from tests.support.assets import RECIPE
from tests.training import runs


@pytest.mark.usefixtures("one_process")
def test_the_summary_of_a_run_corrects_the_next_plan(tmp_path):
    rundir = small.emit(tmp_path / "run", "run.steps=4", seq_length=32)
    runs.run(rundir, export_at_end=False)
    summary = json.loads((rundir.path / "summary.json").read_text())
    kept = tmp_path / "calibration.yaml"
    words = ["plan", str(RECIPE), "cluster=1xcpu", "layout.engine=torch", "layout.zero_stage=0"]

    def planned(name, *more):
        done = CliRunner().invoke(app, [*words, "--save", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
        return Plan.load(tmp_path / name).predicted

    before = planned("before.yaml")
    after = planned("after.yaml", "--calibrate", str(rundir.path / "summary.json"), "--calibration", str(kept))
    later = planned("later.yaml", "--calibration", str(kept))
    factor = summary["measured_step_time_s"] / rundir.plan.predicted.step_time_s
    (residual,) = yaml.safe_load(kept.read_text()).values()
    assert residual["step_time_factor"] == pytest.approx(factor)
    assert residual["extra_gib"] == 0, "what a CPU process holds is no GPU's peak"
    assert "calibrated by 1 run" in after.step_time_evidence
    assert after.step_time_s == later.step_time_s == pytest.approx(factor * before.step_time_s)
    assert planned("without.yaml").step_time_s == before.step_time_s, "a calibration is handed in, not found"

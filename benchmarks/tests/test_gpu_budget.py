"""The time that was given is kept, whatever rows do with it, and both files are there at the end."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

import kit
from benchmarks.gpu import run
from benchmarks.gpu.measured import speed
from benchmarks.gpu.page import page
from kit.specs.catalog import load_model, parse_cluster

PART = {
    "date": "2026-01-01T00:00:00", "commit": "a1", "changed": False, "hardware": {}, "python": "3.12", "versions": {},
    "load": 0.0,
}  # fmt: skip
"""What ``describe`` asks of git and the driver, in no time."""
WORKER = """import json, sys, time
spec = json.load(open(sys.argv[-1]))
time.sleep({seconds})
json.dump({{"status": "refused", "why": "a stand-in"}}, open(spec["out"], "w"))
"""
"""In place of Python with ``-m benchmarks.gpu.worker SPEC``: takes its time, and ends as a row."""


def program(tmp_path, monkeypatch, text):
    """A program in place of Python."""
    (tmp_path / "program").write_text(text)
    (tmp_path / "program").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "program"))


def run_all(tmp_path, monkeypatch, seconds, minutes):
    """(result, wall seconds) of the whole program with workers that take so many seconds each."""
    (tmp_path / "worker.py").write_text(WORKER.format(seconds=seconds))
    command = shlex.join([sys.executable, "-S", str(tmp_path / "worker.py")])
    program(tmp_path, monkeypatch, f'#!/bin/sh\nexec {command} "$@"\n')
    monkeypatch.setattr(run, "doctor", lambda: "")
    monkeypatch.setattr(run, "describe", lambda device: PART | {"device": device})
    monkeypatch.setattr(run, "LEAST_S", 0.5)
    began = time.monotonic()
    assert run.main(device="cpu", minutes=minutes, out=tmp_path / "out") == 0
    took_s, result = time.monotonic() - began, json.loads((tmp_path / "out.json").read_text())
    assert (tmp_path / "out.md").read_text() == page(result)
    return result, took_s


@pytest.fixture
def names():
    """Names of all rows, in the order in which they run."""
    return [(job.section, job.name) for job in run.jobs("cpu", Path())]


def test_a_row_that_does_not_end_takes_no_more_than_what_is_left(tmp_path, monkeypatch, names):
    result, took_s = run_all(tmp_path, monkeypatch, seconds=60, minutes=2 / 60)
    first, *others = [(section, row["name"], row["status"]) for section, rows in result["rows"].items() for row in rows]
    assert first == (*names[0], "too slow")
    assert {status for _, _, status in others} == {"skipped"}
    assert took_s < 2 + 2


def test_a_doctor_that_hangs_is_no_end(monkeypatch, tmp_path):
    program(tmp_path, monkeypatch, "#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(run, "DOCTOR_LIMIT_S", 0.2)
    assert run.doctor() == "kit doctor: no end within 0.2 s"


def test_the_log_of_a_row_that_failed_is_printed(tmp_path, monkeypatch, capsys):
    """The machine is given back, and its scratch folder with it."""
    program(tmp_path, monkeypatch, "#!/bin/sh\necho first; seq 2 40; exit 3\n")
    (tmp_path / "scratch").mkdir()
    began = run.Run("cpu", tmp_path / "scratch", time.monotonic() + 60, tmp_path / "out")
    row = began.row(run.Job("peaks", "peaks", {"kind": "peaks"}, 60.0), 0)
    assert (row["status"], row["why"]) == ("failed", "exit code 3: died")
    assert capsys.readouterr().out.split() == [str(number) for number in range(11, 41)]


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989.4e12), ("fp8", 1978.9e12)])
def test_utilisation_is_of_the_peak_of_the_precision(precision, peak):
    """As in a plan: 8 · 4,096 tokens a step, 6 FLOPs a weight of GEMMs, and causal attention of 16 layers."""
    layers = 16 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    flops = 6 * (layers + 128_256 * 2048) + 6 * 16 * 4096 * 2048
    job = kit.JobSpec(seq_length=4096, global_batch_size=8, precision=precision)
    plan = kit.plan(load_model("llama-3.2-1b"), parse_cluster("1xH100"), job, kit.Pins(engine="torch"))
    assert speed(plan, 0.5)["mfu"] == pytest.approx(8 * 4096 / 0.5 * flops / peak, rel=1e-3)

"""Today's predictions beside what one H200 measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.gpu import cases
from benchmarks.gpu.measured import beside_prediction
from kit.specs.catalog import parse_cluster
from tests.support import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/gpu-cuda-2026-11-26.json").read_text(encoding="utf-8"))
ROWS = {row["name"]: row for row in RESULTS["rows"]["predicted"] if row["status"] == "ok"}


@pytest.mark.parametrize("name", ROWS)
def test_peaks_of_memory_are_within_half_a_percent(name, monkeypatch, tmp_path):
    """Three engines, eager and compiled blocks, fp8, adapters: nothing was fitted to these rows."""
    h200 = dataclasses.replace(parse_cluster("1xH200"), host_ram_gib=125.0)
    monkeypatch.setattr(cases, "machine", lambda device, scratch: h200)
    plan, row = cases.planned(cases.BY_NAME[name], "cuda", tmp_path), ROWS[name]
    assert {key: getattr(plan.layout, key) for key in row["layout"]} == row["layout"]
    memory = {key: row[key] for key in ("measured_allocated_gib", "measured_reserved_gib")}
    assert beside_prediction(plan, row["steps_s"], memory)["memory_ratio"] == pytest.approx(1, abs=5e-3)

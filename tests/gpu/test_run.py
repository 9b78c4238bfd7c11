"""The GPU benchmark's own promises: whatever becomes of a row, the rest goes on and the page says what happened."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import kit
from benchmarks.gpu import cases, devices, measured, page, peers, run, worker


@pytest.fixture
def session(tmp_path) -> run.Run:
    return run.Run("cpu", tmp_path, time.monotonic() + 600, tmp_path / "result")


def spec(kind: str, name: str, scratch: Path) -> dict[str, str]:
    return {"kind": kind, "name": name, "device": "cpu", "scratch": str(scratch)}


def test_every_case_has_a_plan_for_one_h200_or_a_reason(tmp_path, monkeypatch):
    """No case is misspelt, and what is refused is refused for want of support or room, which the row then says."""
    big = kit.plan("llama-3.2-1b", "1xH200", kit.JobSpec(seq_length=128, global_batch_size=1)).cluster
    roomy = cases.dataclasses.replace(big, host_ram_gib=512.0, nvme_gib=512.0)
    monkeypatch.setattr(cases, "machine", lambda device, scratch: roomy)
    refused = {}
    for case in cases.CASES:
        try:
            plan = cases.planned(case, "cuda", tmp_path)
        except kit.KitError as error:
            refused[case.name] = str(error)
        else:
            assert plan.layout.engine == case.pins["engine"]
    assert len(cases.CASES) - len(refused) >= 10
    unpinned = cases.dataclasses.replace(cases.RECIPES[0], pins={"engine": "torch", "micro_batch_size": 4})
    assert cases.planned(unpinned, "cuda", tmp_path).layout == cases.planned(cases.RECIPES[0], "cuda", tmp_path).layout
    peers_layout = cases.peers_plan("cuda", tmp_path).layout
    assert (peers_layout.micro_batch_size, peers_layout.chunked_loss, peers_layout.compile_layers) == (4, False, False)
    assert not refused


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out of memory"),
        (ImportError("No module named 'liger_kernel'"), "skipped"),
        (peers.Skipped("transformer-engine is not installed"), "skipped"),
        (kit.KitError("does not fit"), "refused"),
        (RuntimeError("cannot open /data/secret/file.bin"), "failed"),
    ],
)
def test_what_a_row_can_end_as(tmp_path, monkeypatch, raised, status):
    def fails(*_):
        raise raised

    monkeypatch.setattr(measured, "measure", fails)
    row = worker.outcome(spec("case", "1B, torch", tmp_path))
    assert row["status"] == status
    assert "/root" not in row["why"]


def test_what_hangs_is_a_row(session):
    row = session.row(run.Job("peaks", "peaks", {"kind": "peaks"}, limit_s=0.1), 0)
    assert row["status"] == "too slow"


def test_without_time_a_row_is_not_begun(session):
    session.deadline = time.monotonic() + 1
    row = session.row(run.Job("peaks", "peaks", {"kind": "peaks"}, limit_s=60), 0)
    assert row["status"] == "skipped" and "minutes" in row["why"]  # noqa: PT018


def test_a_dead_worker_is_a_row(session, monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "/bin/false")
    row = session.row(run.Job("peaks", "peaks", {"kind": "peaks"}, limit_s=60), 0)
    assert row["status"] == "failed"


def test_the_page_names_what_is_missing(session):
    session.result = {
        "machine": {
            "device": "cpu",
            "date": "2026-01-01",
            "commit": None,
            "versions": {},
            "hardware": {},
            "python": "3",
        },
        "minutes": 8.0,
        "doctor": "",
        "rows": {"predicted": [{"name": "3B, torch", "status": "out of memory", "why": "of 8 GiB | all"}]},
    }
    session.save()
    text = session.out.with_suffix(".md").read_text()
    assert text == page.page(json.loads(session.out.with_suffix(".json").read_text()))
    assert "no figure here is a GPU's" in text
    assert "| predicted | 3B, torch | out of memory | of 8 GiB \\| all |" in text


def test_a_wrong_gradient_disagrees(tmp_path):
    from safetensors.torch import save_file

    for name, factor in (("reference", 1.0), ("torch", 1.0 + 1e-5), ("megatron", 2.0)):
        folder = tmp_path / name / "llama"
        folder.mkdir(parents=True)
        save_file({"weight": torch.full((4,), factor)}, folder / "gradients.safetensors")
        (folder / "curve.json").write_text(json.dumps([{"step": 1, "loss": 7.0, "norm": 1.0}]))
    agreed = [
        devices.agreement(tmp_path / "reference", tmp_path / name, "cuda")[0]["agrees"]
        for name in ("torch", "megatron")
    ]
    assert agreed == [True, False]


def test_going_on_keeps_what_is_ok_and_of_the_same_commit(tmp_path):
    about = {"commit": "a1", "hardware": {"name": "H200"}, "device": "cuda"}
    rows = {
        "predicted": [{"name": "x", "status": "ok"}, {"name": "y", "status": "too slow"}],
        "devices": [{"status": "ok"}],
    }
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"machine": about, "rows": rows}))
    assert run.kept_rows(file, about) == {"predicted": [{"name": "x", "status": "ok"}]}
    with pytest.raises(SystemExit):
        run.kept_rows(file, about | {"commit": "b2"})

"""The GPU benchmark's own promises: whatever becomes of a row, the rest goes on and the page says what happened."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

import kit
from benchmarks.gpu import cases, devices, measured, run, worker


@pytest.fixture
def session(tmp_path) -> run.Run:
    return run.Run("cpu", tmp_path, time.monotonic() + 600, tmp_path / "result")


def spec(kind: str, name: str, scratch: Path) -> dict[str, str]:
    return {"kind": kind, "name": name, "device": "cpu", "scratch": str(scratch)}


def test_every_case_has_a_plan_for_one_h200(tmp_path, monkeypatch):
    """No case is misspelt, and each is planned on a node with much host memory."""
    big = kit.plan("llama-3.2-1b", "1xH200", kit.JobSpec(seq_length=128, global_batch_size=1)).cluster
    roomy = dataclasses.replace(big, host_ram_gib=512.0, nvme_gib=512.0)
    monkeypatch.setattr(cases, "machine", lambda device, scratch: roomy)
    for case in cases.CASES:
        assert cases.planned(case, "cuda", tmp_path).layout.engine == case.pins["engine"]
    unpinned = dataclasses.replace(cases.RECIPES[0], pins={"engine": "torch", "micro_batch_size": 4})
    assert cases.planned(unpinned, "cuda", tmp_path).layout == cases.planned(cases.RECIPES[0], "cuda", tmp_path).layout
    peers_layout = cases.peers_plan("cuda", tmp_path).layout
    assert (peers_layout.micro_batch_size, peers_layout.chunked_loss, peers_layout.compile_layers) == (4, False, False)


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out of memory"),
        (ImportError("No module named 'liger_kernel'"), "skipped"),
        (cases.Skipped("transformer-engine is not installed"), "skipped"),
        (kit.KitError("does not fit"), "refused"),
        (RuntimeError("cannot open /data/secret/file.bin"), "failed"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),  # of page-locked host memory
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out of memory"),
        (MemoryError(), "out of memory"),
    ],
)
def test_what_a_row_can_end_as(tmp_path, monkeypatch, raised, status):
    def fails(*_):
        raise raised

    monkeypatch.setattr(measured, "measure", fails)
    row = worker.outcome(spec("case", "1B, torch", tmp_path))
    assert row["status"] == status
    assert "/root" not in row["why"]


def test_an_allocation_that_fails_inside_of_a_compiler_is_out_of_memory(tmp_path, monkeypatch):
    """A real one, wrapped as torch.compile wraps what a backend raises; and an error beside it is none."""

    def fails(*_):
        try:
            torch.empty(2**50)
        except RuntimeError as lack:
            raise kit.KitError("the layers could not be compiled") from lack

    monkeypatch.setattr(measured, "measure", fails)
    assert worker.outcome(spec("case", "1B, torch", tmp_path))["status"] == "out of memory"
    assert worker.out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def test_a_wrong_gradient_disagrees(tmp_path):
    from safetensors.torch import save_file

    for name, factor in (("reference", 1.0), ("torch", 1.0 + 1e-5), ("megatron", 2.0)):
        folder = tmp_path / name / "llama"
        folder.mkdir(parents=True)
        save_file({"weight": torch.full((4,), factor)}, folder / "gradients.safetensors")
        (folder / "curve.json").write_text(json.dumps([{"step": 1, "loss": 7.0, "grad_norm": 1.0}]))
    for name, agrees in (("torch", True), ("megatron", False)):
        assert devices.agreement(tmp_path / "reference", tmp_path / name, "cuda")[0]["agrees"] is agrees


def test_a_reference_that_ended_early_ends_no_run(session):
    """The row says which model is missing, and the script goes on."""
    for folder in ("curves/reference/llama", "curves/torch/llama", "curves/torch/mixtral"):
        (session.scratch / folder).mkdir(parents=True)
    (session.scratch / "curves/reference/llama/curve.json").write_text("[]")
    row = {"name": "torch on cpu", "status": "ok"}
    job = run.Job("devices", "torch on cpu", {"curves": str(session.scratch / "curves/torch")}, limit_s=1)
    run._compare(session, job, row)
    assert (row["status"], "mixtral" in row["why"]) == ("skipped", True)

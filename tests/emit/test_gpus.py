"""Other GPUs than planned: said before a process starts, with how to plan again."""

from __future__ import annotations

from pathlib import Path

import pytest

import kit
from kit.emit.run_directory import write
from kit.planner.plan import Plan
from kit.preflight.requirements import check_gpus, gpus_here
from kit.specs.run import DataSpec, RunSpec
from tests.emit.test_machine import MODEL
from tests.test_bad_input import answer

JOB = kit.JobSpec(seq_length=32, global_batch_size=16, total_tokens=10_000)
H100, A100, A100_40 = ("NVIDIA H100 80GB HBM3", 79.6), ("NVIDIA A100-SXM4-80GB", 80.0), ("NVIDIA A100-SXM4-40GB", 40.0)


def plan(cluster: str = "4xH100") -> Plan:
    return kit.plan(MODEL, cluster, JOB, kit.Pins(engine="deepspeed", zero_stage=2))


@pytest.mark.parametrize(
    ("cluster", "found"),
    [
        ("4xH100", [H100] * 4),
        ("4xH100", [H100] * 8),
        ("4xH100", [A100_40, *[H100] * 4]),
        ("4xA100-80", [A100] * 4),
        ("16xH100", [H100] * 8),
        ("2xcpu", []),
    ],
)
def test_the_planned_gpus_pass(cluster: str, found: list[tuple[str, float]]) -> None:
    assert check_gpus(plan(cluster), found) is None


@pytest.mark.parametrize(
    ("cluster", "found", "said"),
    [
        ("4xH100", [H100] * 3, "3 x NVIDIA H100 80GB HBM3 (80 GiB)"),
        ("4xH100", [A100] * 4, "4 x NVIDIA A100-SXM4-80GB (80 GiB)"),
        ("4xA100-80", [A100_40] * 4, "4 x NVIDIA A100-SXM4-40GB (40 GiB)"),
        ("4xH100", [A100_40, *[H100] * 3], "1 x NVIDIA A100-SXM4-40GB (40 GiB), 3 x NVIDIA H100 80GB HBM3 (80 GiB)"),
        ("4xH100", [("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5)] * 4, "(40 GiB)"),
        ("16xH100", [], "no GPU"),
    ],
)
def test_others_are_refused(cluster: str, found: list[tuple[str, float]], said: str) -> None:
    result = check_gpus(plan(cluster), found)
    assert result is not None
    assert result.state == "failure"
    assert said in result.said
    assert "plan for what is here: kit emit RECIPE cluster=" in result.fix


def test_a_run_ends_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, on a machine whose nvidia-smi lists two A100."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"train{suffix}").touch()
    run = write(plan(), RunSpec(data=DataSpec(train=str(tmp_path / "train"))), tmp_path / "run").path
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 40960'\necho 'NVIDIA A100-SXM4-40GB, 40960'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = answer(["train", str(run)], capsys, monkeypatch)
    assert "the plan is for 4 x H100 (79 GiB) a node" in said
    assert "2 x NVIDIA A100-SXM4-40GB (40 GiB)" in said
    assert "cluster=local" in said
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "1"}) == [("NVIDIA A100-SXM4-40GB", 40.0)]
    assert len(gpus_here({}) or []) == 2

"""What a DeepSpeed user gets wrong: one line that names value, rule and fix, exit code 2, before training.

Host memory and disks are those of this machine; a plan that asks for more than anyone has stands for one too large.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

import kit
import kit.cli
import kit.preflight.requirements
from kit.emit.run_directory import RunDirectory, write
from kit.planner.plan import Plan
from kit.preflight.run_checks import preflight
from kit.specs.catalog import parse_cluster
from kit.specs.run import DataSpec, RunSpec
from tests.emit.test_preflight import CONFIG

SMALL = kit.JobSpec(seq_length=32, global_batch_size=8, total_tokens=10_000, precision="fp32")


def answer(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``kit WORDS`` writes to stderr. It must end with 2, without having started a process."""

    def started(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "execv", started)
    monkeypatch.setattr("sys.argv", ["kit", *words])
    with pytest.raises(SystemExit) as ended:
        kit.cli.main()
    found = capsys.readouterr()
    assert ended.value.code == 2
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err + found.out
    return found.err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"train{suffix}").touch()
    (tmp_path / "train.json").write_text(json.dumps({"max_token_id": 127, "num_tokens": 1000}))
    return path


def planned(model: Path, **pins: object) -> Plan:
    cluster = dataclasses.replace(parse_cluster("2xcpu"), host_ram_gib=8.0, nvme_gib=10.0)
    return kit.plan(model, cluster, SMALL, kit.Pins(engine="deepspeed", **pins))  # type: ignore[arg-type]


def emitted(plan: Plan, model: Path, nvme_path: Path | None = None) -> Path:
    data = DataSpec(train=str(model.parent / "train"))
    run = RunSpec(model_path=str(model), data=data, nvme_path=None if nvme_path is None else str(nvme_path))
    return write(plan, run, model.parent / "run").path


def test_a_model_of_an_unsupported_kind(model, capsys, monkeypatch):
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "no-such-type"}))
    said = answer(["plan", str(model), "--gpus", "8xH100", "--engine", "deepspeed"], capsys, monkeypatch)
    assert "no-such-type" in said
    assert "llama" in said  # one that would do


@pytest.mark.parametrize(
    ("fixes", "said"),
    [
        (["zero_stage=2", "offload_optimizer=nvme"], "only stage 3 swaps"),
        (["zero_stage=0", "offload_optimizer=cpu"], "use zero_stage=1, 2 or 3"),
        (["zero_stage=2", "pp=2"], "excludes pipeline parallelism"),
        (["zero_stage=2", "zero_hpz=2"], "it is part of stage 3; use zero_stage=3"),
    ],
)
def test_a_stage_that_forbids_what_is_asked(fixes, said, capsys, monkeypatch):
    words = [f"layout.{fix}" for fix in fixes]
    assert said in answer(
        ["plan", "llama-3.1-8b", "--gpus", "8xA100-40", "--engine", "deepspeed", *words], capsys, monkeypatch
    )


def test_an_optimizer_that_the_engine_has_not(tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: llama-3.1-8b\ncluster: 8xA100-40\njob: {optimizer: {name: muon}}\nlayout: {engine: deepspeed}\n"
    )
    assert "optimizer.name=muon" in answer(["plan", str(recipe)], capsys, monkeypatch)


@pytest.mark.parametrize("there", [False, True], ids=["missing", "a file"])
def test_an_nvme_path_that_is_no_directory(model, there, capsys, monkeypatch):
    path = model.parent / "disk"
    if there:
        path.touch()
    run = emitted(planned(model, zero_stage=3, offload_optimizer="nvme"), model, path)
    said = answer(["train", str(run)], capsys, monkeypatch)
    assert "run.nvme_path=" in said
    assert "mount the disk there" in said


def test_an_nvme_disk_that_is_full(model, capsys, monkeypatch):
    disk = model.parent / "disk"
    disk.mkdir()
    plan = planned(model, zero_stage=3, offload_optimizer="nvme")
    much = dataclasses.replace(plan.predicted, nvme_gib_per_node=1e6)
    run = emitted(dataclasses.replace(plan, predicted=much), model, disk)
    said = answer(["train", str(run)], capsys, monkeypatch)
    assert "the swap files take 1000000.00" in said
    assert "make room" in said


def test_no_libaio(model, capsys, monkeypatch):
    disk = model.parent / "disk"
    disk.mkdir()
    run = emitted(planned(model, zero_stage=3, offload_optimizer="nvme"), model, disk)
    monkeypatch.setattr(kit.preflight.requirements, "find_library", lambda name: None)
    said = answer(["train", str(run)], capsys, monkeypatch)
    assert "libaio-dev" in said
    assert "libaio-devel" in said


def test_too_little_host_memory_for_the_plan(capsys, monkeypatch):
    words = ["plan", "llama-3-70b", "--gpus", "8xA100-40", "--engine", "deepspeed"]
    words += ["layout.zero_stage=3", "layout.offload_optimizer=cpu"]
    said = answer(words, capsys, monkeypatch)
    assert "GiB of host memory a node" in said
    assert "it fits with layout.offload_optimizer left to the planner instead of cpu" in said
    assert "it fits with cluster.host_ram_gib=1753 instead of 953, for offload" in said


def test_too_little_host_memory_on_this_machine(model, capsys, monkeypatch):
    plan = planned(model, zero_stage=3, offload_optimizer="cpu")
    much = dataclasses.replace(plan.predicted, host_ram_gib_per_node=1e6)
    said = answer(["train", str(emitted(dataclasses.replace(plan, predicted=much), model))], capsys, monkeypatch)
    assert "offload needs 100000" in said
    assert "available" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train_batch_size": 16}, "job.global_batch_size"),
        ({"zero_optimization": {"stage": 3}}, "layout.zero_stage"),
        ({"fp16": {"enabled": True}}, "job.precision"),
        ({"sequence_parallel_size": 2}, "layout.cp"),
        ({"tensor_parallel": {"autotp_size": 2}}, "layout.tp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_edited_against_the_plan(model, change, named, capsys, monkeypatch):
    run = emitted(planned(model, zero_stage=2), model)
    file = run / "ds_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    said = answer(["train", str(run)], capsys, monkeypatch)
    assert f"change {named} in the recipe and emit again" in said


def native_checkpoint(path: Path, ranks: int) -> Path:
    """Makes a directory named as ``kit.training.checkpoint.engine_checkpoint`` names it. No file of it is read before
    its manifest fits."""
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"format": "kit-native", "version": 1, "world_size": ranks}))
    return path


def test_a_native_resume_on_another_number_of_ranks(model, capsys, monkeypatch):
    run = emitted(planned(model, zero_stage=2), model)
    step = native_checkpoint(model.parent / "step-00000004", ranks=4)
    said = answer(["train", str(run), "--resume", str(step)], capsys, monkeypatch)
    assert "written by 4 ranks where the plan has 2" in said
    assert "resume from an exchange checkpoint (exchange-step-…)" in said


def test_a_native_resume_on_as_many_ranks_starts(model):
    """The check is of ranks alone: whether the plan is the same is the engine's to see."""
    run = emitted(planned(model, zero_stage=2), model)
    preflight(RunDirectory.open(run), native_checkpoint(model.parent / "step-00000004", ranks=2))


def test_fewer_processes_than_planned(model, capsys, monkeypatch):
    from kit.training.__main__ import main

    run = emitted(planned(model, zero_stage=2), model)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert main([str(run)]) == 2
    assert "3 processes were started where the plan has 2" in capsys.readouterr().err

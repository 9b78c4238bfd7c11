"""What a DeepSpeed user gets wrong in a run: one line that names value, rule and fix, exit code 2, before training.

Host memory and disks are those of this machine; a plan that asks for more than anyone has stands for one too large.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import kit
import kit.preflight.requirements
from kit.emit.run_directory import write
from kit.planner.plan import Plan
from kit.specs.catalog import parse_cluster
from kit.specs.run import DataSpec, RunSpec
from tests.emit.plans import CONFIG
from tests.support.in_process import kit_main

SMALL = kit.JobSpec(seq_length=32, global_batch_size=8, total_tokens=10_000, precision="fp32")


def refusal(*words: str) -> str:
    done = kit_main(*words)
    assert (done.code, done.err[:7]) == (2, "error: ")
    return done.err


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


def test_a_model_of_an_unsupported_kind(model):
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "no-such-type"}))
    said = refusal("plan", str(model), "--gpus", "8xH100", "--engine", "deepspeed")
    assert "no-such-type" in said
    assert "llama" in said  # one that would do


DISK = {"zero_stage": 3, "offload_optimizer": "nvme"}


@pytest.mark.parametrize(
    ("disk", "needs", "said"),
    [
        ("missing", {}, ("run.nvme_path=", "mount the disk there")),
        ("a file", {}, ("run.nvme_path=", "mount the disk there")),
        ("a directory", {"nvme_gib_per_node": 1e6}, ("the swap files take 1000000.00", "make room")),
        ("no libaio", {}, ("libaio-dev", "libaio-devel")),
        (None, {"host_ram_gib_per_node": 1e6}, ("offload needs 100000", "available")),
    ],
)
def test_a_disk_or_memory_that_will_not_do(model, disk, needs, said, monkeypatch):
    plan = planned(model, **(DISK if disk else {"zero_stage": 3, "offload_optimizer": "cpu"}))
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, **needs))
    path = model.parent / "disk"
    if disk != "missing":
        path.touch() if disk == "a file" else path.mkdir()
    if disk == "no libaio":
        monkeypatch.setattr(kit.preflight.requirements, "find_library", lambda name: None)
    words = refusal("train", str(emitted(plan, model, path if disk else None)))
    assert all(part in words for part in said)


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
def test_a_config_edited_against_the_plan(model, change, named):
    run = emitted(planned(model, zero_stage=2), model)
    file = run / "ds_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    said = refusal("train", str(run))
    assert f"change {named} in the recipe and emit again" in said


def test_fewer_processes_than_planned(model, capsys, monkeypatch):
    from kit.training.__main__ import main

    run = emitted(planned(model, zero_stage=2), model)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert main([str(run)]) == 2
    assert "3 processes were started where the plan has 2" in capsys.readouterr().err

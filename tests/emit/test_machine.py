"""Offload asks something of the machine; what it lacks is said before any process starts."""

import dataclasses
from pathlib import Path

import pytest

import kit
from kit.errors import RunDirectoryError
from kit.planner.plan import Plan
from kit.preflight.check_result import require
from kit.preflight.requirements import check_host_memory, check_nvme, swap_directory
from kit.specs.catalog import parse_cluster
from kit.specs.local import host_memory
from kit.specs.run import DataSpec, RunSpec
from kit.units import to_gib

MODEL = kit.ModelSpec(
    name="tiny",
    family="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=128,
    max_position_embeddings=64,
    rope_theta=10000.0,
)


def plan(optimizer: str = "nvme") -> Plan:
    cluster = dataclasses.replace(parse_cluster("2xcpu"), host_ram_gib=8.0, nvme_gib=10.0)
    job = kit.JobSpec(seq_length=32, global_batch_size=8, total_tokens=10_000, precision="fp32")
    return kit.plan(MODEL, cluster, job, kit.Pins(engine="deepspeed", zero_stage=3, offload_optimizer=optimizer))


def run(path: Path | None) -> RunSpec:
    return RunSpec(data=DataSpec(train="train"), nvme_path=None if path is None else str(path))


def larger(gib: float) -> Plan:
    chosen = plan()
    return dataclasses.replace(chosen, predicted=dataclasses.replace(chosen.predicted, nvme_gib_per_node=gib))


def test_a_good_disk_passes_and_is_left_empty(tmp_path: Path) -> None:
    assert check_nvme(plan(), run(tmp_path), tmp_path / "run") is None
    assert check_nvme(plan("cpu"), run(None), tmp_path / "run") is None
    assert list(tmp_path.iterdir()) == []


def test_two_runs_never_share_swap_files(tmp_path: Path) -> None:
    first, second = (swap_directory(plan(), run(tmp_path), tmp_path / name) for name in ("a", "b"))
    assert first != second
    assert first is not None
    assert first.parent == tmp_path


def test_the_path_belongs_to_the_run(tmp_path: Path) -> None:
    refused(plan(), run(None), tmp_path, "run.nvme_path is missing")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    refused(plan(), run(tmp_path / "disk"), tmp_path, "no such directory")


def test_a_disk_that_cannot_be_written() -> None:
    refused(plan(), run(Path("/proc")), Path("/proc"), "not writable")


def test_a_disk_too_small(tmp_path: Path) -> None:
    refused(larger(1e9), run(tmp_path), tmp_path, "the swap files take 1000000000.00")


def refused(chosen: Plan, of: RunSpec, run_directory: Path, message: str) -> None:
    with pytest.raises(RunDirectoryError) as error:
        require(check_nvme(chosen, of, run_directory))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_host_memory_that_is_not_free() -> None:
    chosen = plan("cpu")
    assert check_host_memory(chosen) is None
    available = to_gib(host_memory()["MemAvailable"])
    predicted = dataclasses.replace(chosen.predicted, host_ram_gib_per_node=available + 100)
    with pytest.raises(RunDirectoryError, match="available; end other programs"):
        require(check_host_memory(dataclasses.replace(chosen, predicted=predicted)))

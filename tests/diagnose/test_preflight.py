"""The doctor of machines: every check is provoked. What this machine can do is done for real (a taken port, a directory
that is not there, another process' facts); what needs GPUs or several hosts starts from facts as those report them."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.emit.run_directory import RunDirectory, write
from kit.errors import SpecError
from kit.preflight import bandwidth, facts, hosts, measurements
from kit.preflight.check_result import CheckResult, merged, table
from kit.preflight.host_checks import check_host
from kit.preflight.remote import read_hostfile
from kit.preflight.requirements import requirements_of
from kit.specs.run import CheckpointSpec, DataSpec, RunSpec
from tests.support import namespaces
from tests.test_cli import kit as command_line

ROOT = Path(__file__).parents[2]
SMI = (
    "0, NVIDIA H100 80GB HBM3, 550.90.07, 81559, 4, 0, 345, 1980, Not Active, Not Active, 34, No, Enabled, "
    "1980, 1980, 700.00, 700.00\n"
)
"""A row as ``nvidia-smi --query-gpu`` prints it."""
SICK = {
    "ecc": (", 0, 345, ", ", 3, 345, ", "gpu-health", "3 uncorrected"),
    "heat": (
        "Not Active, Not Active, 34",
        "Active, Not Active, 91",
        "gpu-health",
        "slowed by its hardware at 345 of 1980",
    ),
    "pages": ("34, No,", "34, Yes,", "gpu-health", "retirement pending"),
    "taken": ("81559, 4,", "81559, 70000,", "gpu-memory", "68.4 GiB are taken"),
    "small": ("81559, 4,", "12288, 4,", "gpus", "12.0 GiB, the plan's peak"),
    "driver": ("550.90.07", "470.82.01", "cuda", "CUDA 12.8, the driver is 470"),
}


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    """This machine's own facts."""
    found = facts.gather({"ports": [29500], "names": ["localhost"]})
    found["ports"] = {"29500": True}
    return found


def rundir(tmp_path: Path, gpus_given: str, **layout: Any) -> RunDirectory:
    tmp_path.mkdir(exist_ok=True)
    plan = kit.plan("llama-3.1-8b", gpus_given, pins=kit.Pins(engine="deepspeed", **layout))
    run = RunSpec(
        data=DataSpec(train=str(tmp_path / "train")), nvme_path=str(tmp_path), checkpoint=CheckpointSpec(keep_last=1)
    )
    return write(plan, run, tmp_path / "run")


def on_gpus(here: dict[str, Any], row: str = SMI, count: int = 8) -> dict[str, Any]:
    """Adds GPUs, a disk with room and a CUDA build of torch to this machine's facts."""
    text = "".join(row.replace("0,", f"{index},", 1) for index in range(count))
    parsed = facts.parse_gpus(text)
    return {**copy.deepcopy(here), "gpus": parsed, "torch_cuda": "12.8", "limits": {"nofile": 1 << 20, "memlock": -1}}


def failures(results: list[CheckResult]) -> dict[str, str]:
    return {result.check: result.said for result in results if result.state == "failure"}


def test_healthy_gpus_pass(here: dict[str, Any], tmp_path: Path) -> None:
    needs = requirements_of(rundir(tmp_path, "8xH100", zero_stage=3))
    found = failures(check_host(on_gpus(here), needs, "node-0"))
    assert set(found) <= {"disk"}  # nobody looked at it


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Enabled, 1980,", "Enabled, 1200,", "clock is set to 1200 MHz, 1980 by default"),
        ("700.00, 700.00", "400.00, 700.00", "power limit is set to 400 W, 700 by default"),
    ],
)
def test_a_gpu_that_is_held_down_is_named(old: str, new: str, says: str, here: dict[str, Any]) -> None:
    found = {result.check: result for result in check_host(on_gpus(here, SMI.replace(old, new)), None, "node-0")}
    assert found["gpu-clocks"].state == "warning"
    assert says in found["gpu-clocks"].said
    healthy = {result.check: result for result in check_host(on_gpus(here), None, "node-0")}
    assert healthy["gpu-clocks"].state == "ok"
    older = SMI.replace("1980, 1980, 700.00, 700.00", "[N/A], [Requested functionality has been deprecated], 700, 700")
    assert facts.parse_gpus(older)[0]["default_mhz"] is None


DCGM_3 = """warning: something before it
{"DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [
  {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}, null,
  {"name": "Page Retirement/Row Remap", "results": [
    {"gpu_ids": "1", "status": "STATUS", "warnings": ["row remap failed"]}]}
]}]}}"""
DCGM_4 = """{"DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [{"name": "software",
  "results": [{"entity_group": "GPU", "entity_id": 3, "status": "Fail",
    "warnings": [{"error_id": 29, "error_severity": SEVERITY, "warning": "persistence mode is disabled"}]}],
  "test_summary": {"status": "Fail"}}]}]}, "metadata": {"version": "4.2.3"}}"""


@pytest.mark.parametrize(
    ("text", "state", "says"),
    [
        (DCGM_3.replace("STATUS", "PASS"), "ok", "pass"),
        (DCGM_3.replace("STATUS", "SKIPPED"), "ok", "pass"),
        (DCGM_3.replace("STATUS", "WARN"), "warning", "row remap failed"),
        (DCGM_3.replace("STATUS", "FAIL"), "failure", "Page Retirement/Row Remap (GPU 1): row remap failed"),
        (
            DCGM_3.replace("STATUS", "FAIL").replace('["row remap failed"]', '"no row left"'),
            "failure",
            "1): no row left",
        ),
        (DCGM_4.replace("SEVERITY", "5"), "warning", "software (GPU 3): persistence mode is disabled"),
        (DCGM_4.replace("SEVERITY", "2"), "failure", "software (GPU 3)"),
    ],
)
def test_what_dcgm_says(text: str, state: str, says: str, here: dict[str, Any]) -> None:
    found = {**on_gpus(here), "dcgm": facts.dcgm_problems(text)}
    result = next(result for result in check_host(found, None, "node-0") if result.check == "dcgm")
    assert result.state == state
    assert says in result.said
    with pytest.raises(ValueError, match="no test"):
        facts.dcgm_problems('{"DCGM Diagnostic": {"version": "4.2.3"}}')


def test_dcgm_that_is_not_there_or_does_not_answer(tmp_path: Path) -> None:
    """A program of that name on the path, as the real one behaves without its daemon."""
    for script, says in (("echo 'Error: Unable to connect' >&2; exit 1", "Unable to connect"), (None, None)):
        program = tmp_path / "dcgmi"
        program.unlink(missing_ok=True)
        if script:
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        words = [sys.executable, "-m", "kit.preflight.facts", "{}"]
        environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        told = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
        found = json.loads(told)["dcgm"]
        assert (found is None) if says is None else says in found["error"]


@pytest.mark.parametrize("fault", SICK)
def test_a_sick_gpu_is_named(fault: str, here: dict[str, Any], tmp_path: Path) -> None:
    old, new, check, says = SICK[fault]
    needs = requirements_of(rundir(tmp_path, "8xH100", zero_stage=3))
    assert old in SMI
    found = failures(check_host(on_gpus(here, SMI.replace(old, new)), needs, "node-0"))
    assert says in found[check]


def test_a_missing_gpu_and_no_driver(here: dict[str, Any], tmp_path: Path) -> None:
    needs = requirements_of(rundir(tmp_path, "8xH100", zero_stage=3))
    assert "7 GPUs, the plan has 8" in failures(check_host(on_gpus(here, count=7), needs, "node-0"))["gpus"]
    assert "no nvidia-smi" in failures(check_host({**here, "gpus": None}, needs, "node-0"))["cuda"]
    silent = {**on_gpus(here), "gpus": {"error": "TimeoutExpired: nvidia-smi"}}
    assert "TimeoutExpired" in failures(check_host(silent, needs, "node-0"))["cuda"]


def test_operators_that_cannot_be_compiled(here: dict[str, Any], tmp_path: Path) -> None:
    needs = requirements_of(rundir(tmp_path, "8xH100", zero_stage=3, offload_optimizer="nvme"))
    bare = on_gpus(here) | {"tools": dict.fromkeys(here["tools"]), "libaio": False}
    results = check_host(bare, needs, "node-0")
    fix = next(result.fix for result in results if result.check == "compilers")
    for package in ("apt-get install g++", "pip install ninja", "libaio-dev", "nvcc"):
        assert package in fix
    other = on_gpus(here) | {"tools": {**here["tools"], "nvcc": "11.8"}}
    assert "nvcc is 11.8" in failures(check_host(other, needs, "node-0"))["cuda"]


def test_a_node_of_amds_gpus_needs_no_nvidia_smi(here: dict[str, Any], tmp_path: Path) -> None:
    bare = here | {"gpus": None}
    for cluster, missing in (("8xH100", True), ("8xMI300X", False)):
        needs = requirements_of(rundir(tmp_path / cluster, cluster, zero_stage=2))
        assert ("cuda" in failures(check_host(bare, needs, "node-0"))) == missing


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        ({"packages": {"torch": None}}, "packages", "not installed: torch"),
        ({"memory": {"MemAvailable": 1 << 30}}, "host-memory", "1.0 GiB available"),
        ({"shm_free_bytes": 64 << 20}, "shm", "0.06 GiB free"),
        ({"limits": {"nofile": 1024, "memlock": -1}}, "ulimits", "1024 open files"),
        ({"limits": {"nofile": 1 << 20, "memlock": 8 << 20}}, "ulimits", "8 MiB of locked memory"),
        ({"addresses_of_own_name": []}, "own-name", "has no address"),
        ({"ports": {"29500": False}}, "port", "port 29500 is taken"),
    ],
)
def test_each_check_can_fail(
    change: dict[str, Any], check: str, says: str, here: dict[str, Any], tmp_path: Path
) -> None:
    needs = requirements_of(rundir(tmp_path, "16xH100", zero_stage=2, offload_optimizer="cpu"))
    healthy = on_gpus(here) | {"addresses_of_own_name": ["10.0.0.1"]}
    healthy["memory"] = {"MemAvailable": 2 << 40}
    assert check not in failures(check_host(healthy, needs, "node-0"))
    assert says in failures(check_host({**healthy, **change}, needs, "node-0"))[check]


def test_debians_own_name(here: dict[str, Any], tmp_path: Path) -> None:
    needs = requirements_of(rundir(tmp_path, "16xH100", zero_stage=2))
    found = check_host({**on_gpus(here), "addresses_of_own_name": ["127.0.1.1"]}, needs, "node-0")
    assert [result.state for result in found if result.check == "own-name"] == ["warning"]


def test_checkpoints_that_do_not_fit_or_cannot_be_written(here: dict[str, Any], tmp_path: Path) -> None:
    made = rundir(tmp_path, "8xH100", zero_stage=3)
    needs = requirements_of(made)
    for there, says in (
        ({"free_bytes": 200 << 30}, "269.2 needed for all that is kept"),  # 8.03e9 parameters × 12 bytes × (1 kept + 2)
        ({"error": "Read-only file system"}, "Read-only"),
    ):
        found = on_gpus(here) | {"writable": {str(made.path): there}}
        assert says in failures(check_host(found, needs, "node-0"))["disk"]


def test_this_machines_facts_are_read_for_real(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        absent = str(tmp_path / "absent")
        found = facts.gather(
            {"ports": [port], "writable": [str(tmp_path), absent], "paths": [str(ROOT / "README.md"), absent]}
        )
    assert found["ports"] == {str(port): False}
    assert found["writable"][str(tmp_path)]["free_bytes"] > 0
    assert "No such file" in found["writable"][absent]["error"]
    assert found["contents"][absent] is None
    assert found["packages"]["torch"]
    assert json.loads(json.dumps(found))["memory"]["MemAvailable"] > 0


def test_one_byte_of_a_large_file_changes_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(5 << 20))
    before = facts.digest(file)
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    assert facts.digest(file) != before


def test_hosts_that_differ_are_named(here: dict[str, Any]) -> None:
    three = {f"node-{n}": copy.deepcopy(here) | {"contents": {"/data/train.bin": "a"}, "names": {}} for n in range(3)}
    for between in hosts._BETWEEN:
        assert {result.state for result in between(three)} == {"ok"}
    three["node-1"]["packages"]["deepspeed"] = "0.18.0"
    three["node-2"]["contents"] = {"/data/train.bin": None}
    three["node-2"]["kernel"] = "5.4"
    three["node-0"]["names"] = {"node-1": [], "node-2": ["10.0.0.3"]}
    (version, kernel), machine, content, names = (between(three) for between in hosts._BETWEEN)
    assert (version.hosts, version.state) == (("node-1",), "failure")
    assert "deepspeed 0.18.0" in version.said
    assert (kernel.hosts, kernel.state) == (("node-2",), "warning")
    assert machine[0].state == "ok"
    assert content[0].hosts == ("node-2",)
    assert names[0].hosts == ("node-0",)
    three["node-1"]["gpus"] = facts.parse_gpus(SMI)
    assert hosts.machines(three)[0].hosts == ("node-1",)


def test_clocks_and_reach() -> None:
    found = hosts.clocks({"node-0": 0.0, "node-1": 3.0, "node-2": -400.0})
    assert [(result.hosts, result.state) for result in found] == [(("node-1",), "warning"), (("node-2",), "failure")]
    assert hosts.clocks({"node-0": 0.2})[0].state == "ok"
    closed = hosts.reach({"node-1": {"node-0": "No route to host"}, "node-0": {"node-1": None}}, 29500)
    assert [(result.hosts, result.state) for result in closed] == [(("node-1",), "failure")]


def test_a_slow_fabric_is_judged_by_this_plan(tmp_path: Path) -> None:
    """A tenth of the fabric stops a plan that gathers weights over it, and hardly touches one with a large batch."""
    plan = rundir(tmp_path, "16xH100", zero_stage=3).plan
    as_assumed = {"all_reduce_between": plan.cluster.inter_node_gbytes_per_s * 0.8}
    fabric = next(v for v in bandwidth.judged(as_assumed, plan) if v.check == "fabric-bandwidth")
    assert fabric.state == "ok"
    assert "1.00 of its prediction" in fabric.said
    slow = next(v for v in bandwidth.judged({"all_reduce_between": 0.5}, plan) if v.check == "fabric-bandwidth")
    assert slow.state == "failure"


def test_copies_and_disks_are_judged_by_this_plan(tmp_path: Path) -> None:
    """A plan whose state is on NVMe lives on both; one that keeps all on the GPU needs neither."""
    swapping = rundir(tmp_path / "a", "8xH100", zero_stage=3, offload_optimizer="nvme").plan
    at_home = rundir(tmp_path / "b", "8xH100", zero_stage=3).plan
    assumed = swapping.cluster.nvme_gbytes_per_s or bandwidth.shared().nvme_gbytes_per_s
    slow, fast = {"write": 0.05, "read": 0.5}, {"write": assumed, "read": assumed}
    assert bandwidth.judged_disk(slow, swapping, "node-1").state == "failure"
    as_planned = bandwidth.judged_disk(fast, swapping, "node-1")
    assert as_planned.state == "ok"
    assert "1.00 of its prediction" in as_planned.said
    assert bandwidth.judged_disk(slow, at_home, "node-1").check == "disk-speed"
    for plan, state in ((swapping, "failure"), (at_home, "ok")):
        found = bandwidth.judged({"host_to_device": 20.0, "device_to_host": 0.2}, plan)
        copy_verdict = next(result for result in found if result.check == "host-copy")
        assert copy_verdict.state == state, copy_verdict.said
    without = next(result for result in bandwidth.judged({}, swapping) if result.check == "host-copy")
    assert (without.state, "no GPU" in without.said) == ("skipped", True)


def test_a_disk_is_measured(tmp_path: Path) -> None:
    try:
        found = measurements.disk_speed(tmp_path, 32 << 20)
    except OSError:
        pytest.skip("SKIPPED: this file system refuses direct I/O")
    assert min(found.values()) > 0


def test_the_table_puts_failures_first_and_joins_hosts() -> None:
    same = [CheckResult("shm", "failure", (host,), "full", "mount") for host in ("a", "b")]
    joined = merged([CheckResult("port", "ok", ("a",), "free"), *same])
    assert [result.hosts for result in joined] == [("a", "b"), ("a",)]
    text = table(joined, 1.0)
    assert text.index("shm") < text.index("port")
    assert "→ mount" in text


@pytest.mark.parametrize(("text", "says"), [("", "no host in it"), ("a slots=1\na slots=1\n", "twice")])
def test_hostfiles_that_are_wrong(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(SpecError, match=says):
        read_hostfile(tmp_path / "hostfile")
    with pytest.raises(SpecError, match="No such file"):
        read_hostfile(tmp_path / "none")


def test_the_command_line_on_this_machine() -> None:
    done = command_line("doctor", "--json")
    rows = json.loads(done.stdout)
    assert done.returncode == (1 if any(row["state"] == "failure" for row in rows) else 0)
    assert {"packages", "own-name", "shm", "ulimits", "port"} <= {row["check"] for row in rows}
    both = command_line("doctor", "x.log", "--bandwidth")
    assert both.returncode == 2
    assert "without logs" in both.stderr


@pytest.mark.nightly
def test_hosts_of_namespaces_differ_where_planted() -> None:
    """One fault of ``tests.system.preflight``: real hosts, a real difference; the only test here that
    needs root."""
    try:
        namespaces.check()
    except namespaces.NoNamespaces as error:
        pytest.skip(f"SKIPPED, nothing was looked at over several hosts: {error}")
    words = [sys.executable, "-m", "tests.system.preflight", "content"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr

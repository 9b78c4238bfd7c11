"""The doctor of machines. Each check of a host is asked about one fact, on both sides of its limit; hosts are compared
where they differ in one thing. What this machine can do is done for real: a taken port, another process' facts."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.addons.doctor.machines import bandwidth, hosts, measurements, remote, sockets
from kit.addons.doctor.machines.host_checks import CHECKS, check_host
from kit.cost.reliability import checkpoint_bytes
from kit.emit.run_directory import RunDirectory, write
from kit.errors import RunDirectoryError, SpecError
from kit.preflight import facts
from kit.preflight.check_result import CheckResult, failure, merged, ok, require, skipped, table, warning
from kit.preflight.requirements import Requirements, requirements_of
from kit.specs.catalog import parse_cluster
from kit.specs.run import BlendedSetSpec, CheckpointSpec, DataSpec, RunSpec
from tests.emit.plans import DENSE, FSDP2, ON_CPU, TORCH, ZERO2, ZERO3, plan_of, stand_in
from tests.support import namespaces
from tests.support.calls import before
from tests.support.in_process import kit_main, kit_refusal
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]
SMI = (
    "0, NVIDIA H100 80GB HBM3, 550.90.07, 81559, 4, 0, 345, 1980, Not Active, Not Active, 34, No, Enabled, "
    "1980, 1980, 700.00, 700.00\n"
)
"""A row as ``nvidia-smi --query-gpu`` prints it."""


def gpus(old: str = "", new: str = "", index: int = 0, count: int = 8) -> list[dict[str, Any]]:
    """Healthy ones, but for one."""
    rows = [SMI.replace("0,", f"{number},", 1) for number in range(count)]
    assert old in rows[index]
    rows[index] = rows[index].replace(old, new)
    return facts.parse_gpus("".join([*rows, "\n"]))


HEALTHY: dict[str, Any] = {
    "hostname": "node-0",
    "addresses_of_own_name": ["10.0.0.1"],
    "addresses": ["10.0.0.1", "10.1.0.1"],
    "names": {},
    "python": "3.11.7",
    "packages": {"torch": "2.13", "transformers": "5.23", "deepspeed": "0.19.8", "accelerate": "1.15", "numpy": "2.1"},
    "kit": "a",
    "torch_cuda": "12.8",
    "nccl": "2.27",
    "kernel": "6.8",
    "tools": {"g++": "12.2", "nvcc": "12.8", "ninja": "1.11"},
    "libaio": True,
    "gpus": gpus(),
    "dcgm": [],
    "memory": {"MemAvailable": 120 << 30},
    "shm_free_bytes": 64 << 30,
    "limits": {"nofile": 1 << 20, "memlock": -1},
    "hub_token": True,
    "contents": {},
    "writable": {"/run": {"free_bytes": 300 << 30}, "/disk": {"free_bytes": 50 << 30}},
    "ports": {"29500": True},
}
NEEDS = Requirements(
    packages=("torch", "transformers", "deepspeed", "accelerate"), cuda=True, gpus_per_node=8, gpu_gib=70.0,
    host_gib=100.0, cpu_adam=True, nvme_gib=50.0, num_nodes=2, paths=(), checkpoint_directory="/run",
    checkpoints_gib=300.0, nvme_path="/disk",
)  # fmt: skip
NO_PLAN: dict[str, Any] = {"no plan": True}
UNUSED = {"cpu_adam": False}
SETTING = {"test": "software", "gpu": "", "failed": False, "said": "persistence"}
FAULT = {"test": "memory", "gpu": "3", "failed": True, "said": "row remap failed"}
H100S = "NVIDIA H100 80GB HBM3"
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str]] = [
    ("packages", {}, {}, "ok", "torch 2.13, transformers 5.23, deepspeed 0.19.8, accelerate 1.15", ""),
    ("packages", {"packages": {"torch": "2.13", "deepspeed": None}}, {}, "failure",
     "not installed: transformers, deepspeed, accelerate", "'deepspeed-megatron-kit[torch,deepspeed]' there"),
    ("packages", {"packages": {"torch": "2.13"}}, NO_PLAN, "ok", "torch 2.13", ""),
    ("packages", {"packages": {}}, NO_PLAN, "failure", "not installed: torch", "deepspeed-megatron-kit[torch]' there"),
    ("compilers", {}, {}, "ok", "g++ 12.2, ninja 1.11", ""),
    ("compilers", {}, NO_PLAN, "skipped", "no plan that compiles operators", ""),
    ("compilers", {"tools": dict.fromkeys(HEALTHY["tools"])}, UNUSED, "skipped", "no plan that compiles operators", ""),
    ("compilers", {"tools": dict.fromkeys(HEALTHY["tools"]), "libaio": False}, {}, "failure", "cannot be compiled",
     "apt-get install g++; pip install ninja; apt-get install libaio-dev (Red Hat: libaio-devel); the CUDA toolkit 12"),
    ("compilers", {"libaio": False}, {"nvme_gib": 0.0}, "ok", "g++ 12.2", ""),
    ("compilers", {"tools": {"g++": "1", "ninja": "1", "nvcc": None}}, {"cuda": False}, "ok", "g++ 1", ""),
    ("cuda", {}, {}, "ok", "torch for CUDA 12.8, driver 550.90.07, NCCL 2.27", ""),
    ("cuda", {"nccl": None}, {}, "ok", "NCCL of torch", ""),
    ("cuda", {}, {"cuda": False}, "skipped", "the plan is not for NVIDIA's GPUs", ""),
    ("cuda", {"gpus": None}, {}, "failure", "no nvidia-smi, and the plan is for GPUs", "install the driver"),
    ("cuda", {"gpus": None}, NO_PLAN, "skipped", "no nvidia-smi", ""),
    ("cuda", {"gpus": {"error": "TimeoutExpired"}}, NO_PLAN, "failure", "TimeoutExpired", "drain the node"),
    ("cuda", {"torch_cuda": None}, {}, "failure", "torch is built for CPUs", "index of your CUDA version"),
    ("cuda", {"gpus": gpus("550.90", "525.10")}, {}, "ok", "driver 525.10", ""),
    ("cuda", {"gpus": gpus("550.90", "524.99")}, {}, "failure", "built for CUDA 12.8, the driver is 524.99",
    "branch 525"),
    ("cuda", {"gpus": [], "torch_cuda": "99.1"}, UNUSED, "ok", "driver 0", ""),
    ("cuda", {"gpus": []}, {}, "failure", "the driver is 0", ""),
    ("cuda", {"tools": {"nvcc": "11.8", "g++": "1", "ninja": "1"}}, {}, "failure", "nvcc is 11.8 and torch",
    "toolkit 12.8"),
    ("cuda", {"tools": {"nvcc": "12.1", "g++": "1", "ninja": "1"}}, {}, "ok", "", ""),
    ("cuda", {"tools": {"nvcc": "11.8", "g++": "1", "ninja": "1"}}, UNUSED, "ok", "", ""),
    ("cuda", {"tools": {"nvcc": "11.8"}}, NO_PLAN, "ok", "", ""),
    ("cuda", {"tools": {"nvcc": None, "g++": "1", "ninja": "1"}}, {}, "ok", "", ""),
    ("gpus", {}, {}, "ok", f"8 x {H100S}, 79.6 GiB", ""),
    ("gpus", {"gpus": gpus(H100S, "another", 7)}, {}, "ok", f"8 x {H100S}, 79.6 GiB", ""),
    ("gpus", {}, NO_PLAN, "skipped", "no plan for NVIDIA's GPUs", ""),
    ("gpus", {}, {"cuda": False}, "skipped", "no plan for NVIDIA's GPUs", ""),
    ("gpus", {"gpus": None}, {}, "skipped", "or none here", ""),
    ("gpus", {"gpus": []}, {}, "failure", "0 GPUs, the plan has 8 a node", ""),
    ("gpus", {"gpus": gpus(count=7)}, {}, "failure", "7 GPUs, the plan has 8 a node", "Xid 79"),
    ("gpus", {"gpus": gpus(count=9)}, {}, "ok", "9 x", ""),
    ("gpus", {"gpus": gpus("81559", "71680", 5)}, {}, "ok", f"8 x {H100S}, 70.0 GiB", ""),
    ("gpus", {"gpus": gpus("81559", "71679", 5)}, {}, "failure", "has 70.0 GiB, the plan's peak is 70.0",
    "cluster=local"),
    ("gpus", {"gpus": gpus("81559", "[N/A]", 5)}, {}, "failure", "has 0.0 GiB", ""),
    ("gpu-health", {"gpus": gpus("34, No", "87.9, No", 3)}, {}, "ok", "no memory errors, not slowed, 88 °C", ""),
    ("gpu-health", {"gpus": gpus("34, No", "88, No", 3)}, {}, "failure",
     "GPU 3: slowed by its hardware at 345 of 1980 MHz, 88 °C", "drain the node"),
    ("gpu-health", {"gpus": gpus("Not Active, Not Active, 34", "Active, Not Active, [N/A]", 7)}, NO_PLAN, "failure",
     "GPU 7: slowed by its hardware at 345 of 1980 MHz, temperature unknown", ""),
    ("gpu-health", {"gpus": gpus("Not Active, Not Active", "Not Active, Active", 1)}, {}, "failure", "GPU 1: slowed",
    ""),
    ("gpu-health", {"gpus": gpus("34, No", "[N/A], No")}, {}, "ok", "34 °C", ""),
    ("gpu-health", {"gpus": gpus(", 0, 345", ", 1, 345", 2)}, {}, "failure", "GPU 2: 1 uncorrected memory errors",
    "-r"),
    ("gpu-health", {"gpus": gpus(", 0, 345", ", [N/A], 345", 2)}, {}, "ok", "no memory errors", ""),
    ("gpu-health", {"gpus": gpus("34, No", "34, Yes", 2)}, {}, "failure",
     "GPU 2: 0 uncorrected memory errors, retirement pending", ""),
    ("gpu-health", {"gpus": []}, {}, "skipped", "no GPU", ""),
    ("gpu-health", {"gpus": {"error": "x"}}, {}, "skipped", "no GPU", ""),
    ("gpu-clocks", {}, {}, "ok", "up to 1980 MHz, nothing held down", ""),
    ("gpu-clocks", {"gpus": gpus("Enabled, 1980,", "Enabled, 1200,", 7)}, {}, "warning",
     "GPU 7: its clock is set to 1200 MHz, 1980 by default", "nvidia-smi -rac: every rank"),
    ("gpu-clocks", {"gpus": gpus("700.00, 700.00", "400.00, 700.00", 1)}, {}, "warning",
     "GPU 1: its power limit is set to 400 W, 700 by default", "nvidia-smi -pl 700: every rank"),
    ("gpu-clocks", {"gpus": gpus("1980, 1980, 700", "1980, [N/A], 700")}, {}, "ok", "", ""),
    ("gpu-clocks", {"gpus": gpus("Enabled, 1980,", "Enabled, [N/A],")}, {}, "ok", "", ""),
    ("gpu-clocks", {"gpus": gpus("345, 1980,", "345, 1755,", 3)}, {}, "warning", "GPUs of 1755, 1980 MHz at most",
    "leave"),
    ("gpu-clocks", {"gpus": gpus("345, 1980,", "345, [N/A],", 3)}, {}, "warning", "GPUs of 0, 1980 MHz at most", ""),
    ("dcgm", {}, {}, "ok", "its quick tests pass", ""),
    ("dcgm", {"dcgm": None}, {}, "skipped", "dcgmi is not installed", ""),
    ("dcgm", {"dcgm": {"error": "no daemon"}}, {}, "warning", "no daemon", "systemctl status nvidia-dcgm"),
    ("dcgm", {"dcgm": [SETTING]}, {}, "warning", "software: persistence", "a setting of the node"),
    ("dcgm", {"dcgm": [SETTING, FAULT]}, {}, "failure", "memory (GPU 3): row remap failed", "drain the node"),
    ("gpu-memory", {"gpus": gpus("81559, 4,", "81559, 1024,", 2)}, {}, "ok", "all free", ""),
    ("gpu-memory", {"gpus": gpus("81559, 4,", "81559, 1025,", 2)}, {}, "warning",
     "GPU 2: 1.0 GiB are taken, 78.6 free, the plan takes 70.0", "kill it"),
    ("gpu-memory", {"gpus": gpus("81559, 4,", "81559, 9880,", 2)}, {}, "failure", "9.6 GiB are taken, 70.0 free", ""),
    ("gpu-memory", {"gpus": gpus("81559, 4,", "81559, 70000,", 2)}, NO_PLAN, "warning",
     "68.4 GiB are taken, 11.3 free", ""),
    ("gpu-memory", {"gpus": gpus("81559, 4,", "81559, [N/A],", 2)}, {}, "ok", "", ""),
    ("gpu-memory", {"gpus": gpus("81559, 4,", "[N/A], [N/A],", 2)}, {}, "failure", "0.0 GiB are taken, 0.0 free", ""),
    ("host-memory", {}, {}, "ok", "120.0 GiB available of 100.0 needed", ""),
    ("host-memory", {}, {"host_gib": 120.0}, "ok", "", ""),
    ("host-memory", {}, {"host_gib": 120.1}, "failure", "120.0 GiB available, the plan takes 120.1", "offload to nvme"),
    ("host-memory", {}, NO_PLAN, "ok", "120.0 GiB available", ""),
    ("shm", {"shm_free_bytes": 1 << 30}, {}, "ok", "1.0 GiB free", ""),
    ("shm", {"shm_free_bytes": (1 << 30) - 1}, {}, "failure", "/dev/shm has 1.00 GiB free", "--shm-size=16g"),
    ("ulimits", {}, {}, "ok", "1048576 open files", ""),
    ("ulimits", {"limits": {"nofile": -1, "memlock": 1 << 30}}, {}, "ok", "-1 open files", ""),
    ("ulimits", {"limits": {"nofile": 4095, "memlock": -1}}, {}, "failure", "4095 open files", "ulimit -n 65536"),
    ("ulimits", {"limits": {"nofile": 0, "memlock": -1}}, {}, "failure", "0 open files", ""),
    ("ulimits", {"limits": {"nofile": 4096, "memlock": -1}}, {}, "warning", "4096 open files", "ulimit -n 65536"),
    ("ulimits", {"limits": {"nofile": 65535, "memlock": -1}}, {}, "warning", "65535 open files", ""),
    ("ulimits", {"limits": {"nofile": 65536, "memlock": (1 << 30) - 1}}, {}, "failure",
     "1023 MiB of locked memory", "ulimit -l unlimited"),
    ("ulimits", {"limits": {"nofile": 65536, "memlock": 0}}, {}, "failure", "0 MiB of locked memory", ""),
    ("ulimits", {"limits": {"nofile": 65536, "memlock": 8}}, {"num_nodes": 1}, "ok", "65536 open files", ""),
    ("ulimits", {"limits": {"nofile": 65536, "memlock": 8}}, NO_PLAN, "ok", "", ""),
    ("ulimits", {"limits": {"nofile": 65536, "memlock": 8}, "gpus": None}, {}, "ok", "", ""),
    ("own-name", {}, {}, "ok", "10.0.0.1", ""),
    ("own-name", {"addresses_of_own_name": []}, {}, "failure", "node-0 has no address", "that others reach (10.0.0.1)"),
    ("own-name", {"addresses_of_own_name": ["127.0.1.1"]}, {}, "warning", "node-0 resolves to 127.0.1.1",
    "GLOO_SOCKET"),
    ("own-name", {"addresses_of_own_name": ["127.0.1.1"]}, {"num_nodes": 1}, "ok", "127.0.1.1, one node", ""),
    ("own-name", {"addresses_of_own_name": ["127.0.1.1"]}, NO_PLAN, "ok", "127.0.1.1, one node", ""),
    ("own-name", {"addresses_of_own_name": ["127.0.1.1", "10.0.0.1"]}, {}, "ok", "127.0.1.1, 10.0.0.1", ""),
    ("port", {}, {}, "ok", "29500 free", ""),
    ("port", {"ports": {"29500": True, "29600": False}}, {}, "failure", "port 29600 is taken", "another MASTER_PORT"),
    ("hub", {"hub_token": False}, {}, "ok", "not needed", ""),
    ("hub", {"hub_token": False}, NO_PLAN, "warning", "no token", "hf auth login"),
    ("hub", {}, NO_PLAN, "ok", "a token is there", ""),
    ("directories", {}, {}, "ok", "300.00 GiB fit; 50.00 GiB fit", ""),
    ("directories", {}, NO_PLAN, "skipped", "no plan", ""),
    ("directories", {}, {"checkpoints_gib": 300.1}, "failure", "/run: 300.0 GiB free, 300.1 needed for all",
    "keep_last"),
    ("directories", {}, {"nvme_gib": 50.1}, "failure", "/disk: 50.0 GiB free, 50.1 needed", ""),
    ("directories", {}, {"nvme_gib": 50.1, "nvme_path": None}, "ok", "", ""),
    ("directories", {"writable": {"/run": {"free_bytes": 1 << 60}}}, {"nvme_gib": 0.0}, "ok", "300.00 GiB fit", ""),
    ("directories", {"writable": {"/run": {"error": "Read-only"}}}, {}, "failure", "/run: Read-only",
    "elsewhere (--out)"),
    ("directories", {"writable": {}}, {}, "failure", "/run: not looked at", ""),
    ("host-memory", {"memory": {"error": "OSError: no /proc"}}, {}, "warning",
     "cannot be looked at (memory: OSError: no /proc)", "look there by hand ('MemAvailable')"),
]  # fmt: skip
OF = {check.__name__: check.__name__.replace("_", "-") for check in CHECKS} | {
    "gpu_count": "gpus", "shared_memory": "shm", "limits": "ulimits",
}  # fmt: skip


@pytest.mark.parametrize(
    ("check", "change", "needs", "state", "said", "fix"), CASES, ids=[f"{case[0]}: {case[4]}" for case in CASES]
)
def test_a_check_of_a_host(
    check: str, change: dict[str, Any], needs: dict[str, Any], state: str, said: str, fix: str
) -> None:
    required = None if needs is NO_PLAN else replace(NEEDS, **needs)
    found = check_host({**copy.deepcopy(HEALTHY), **change}, required, "node-7")
    result = found[list(OF.values()).index(check)]
    assert (result.state, result.hosts, len(found)) == (state, ("node-7",), len(CHECKS))
    assert (said in result.said, fix in result.fix, bool(result.fix)) == (True, True, state in ("failure", "warning"))


def test_a_bug_of_a_check_is_no_fact_that_is_missing() -> None:
    assert refusal(KeyError, check_host, {**HEALTHY, "limits": {}}, NEEDS, "node-0") == "'nofile'"


DCGM_3 = """warning: something before it
{"DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [
  {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}, null,
  {"name": "Row Remap", "results": [{"gpu_ids": "1", "status": "STATUS", "warnings": WARNINGS}]}
]}]}} and after"""
DCGM_4 = """{"DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [{"name": "software",
  "results": [{"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [
    {"error_id": 29, "error_severity": 5, "warning": "no persistence"},
    {"error_id": 29, "error_severity": SEVERITY, "warning": "hot"}]}], "test_summary": {"status": "Fail"}}]}]}}"""
REMAP = {"test": "Row Remap", "gpu": "1", "failed": True, "said": "a; b"}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (DCGM_3.replace("STATUS", "PASS"), []),
        (DCGM_3.replace("STATUS", "SKIPPED"), []),
        (DCGM_3.replace("STATUS", "WARN"), [REMAP | {"failed": False}]),
        (DCGM_3.replace("STATUS", "FAIL"), [REMAP]),
        (DCGM_3.replace("STATUS", "error"), [REMAP]),
        (DCGM_3.replace("STATUS", "FAIL").replace("WARNINGS", '"no row left"'), [REMAP | {"said": "no row left"}]),
        (DCGM_3.replace("STATUS", "FAIL").replace("WARNINGS", "[]"), [REMAP | {"said": "no reason given"}]),
        (DCGM_3.replace("STATUS", "FAIL").replace('"warnings": WARNINGS', '"info": "x"'), [REMAP | {"said": "x"}]),
        # dcgm_errors.h: 5 is a setting of the node, and no fault of its hardware
        (
            DCGM_4.replace("SEVERITY", "5"),
            [{"test": "software", "gpu": "3", "failed": False, "said": "no persistence; hot"}],
        ),
        (
            DCGM_4.replace("SEVERITY", "2"),
            [{"test": "software", "gpu": "3", "failed": True, "said": "no persistence; hot"}],
        ),
    ],
)
def test_what_dcgm_says(text: str, problems: list[dict[str, Any]]) -> None:
    assert facts.dcgm_problems(text.replace("WARNINGS", '["a", "b"]')) == problems


def test_dcgm_that_is_not_there_or_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name on the path, as the real one behaves without its daemon."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.dcgm_answer() is None
    for script, said in (
        ("echo 'Error: Unable to connect' >&2; exit 1", "Unable to connect"), ("exit 9", "dcgmi: exit code 9"),
    ):  # fmt: skip
        stand_in(tmp_path, dcgmi=f"#!/bin/sh\n{script}\n")
        assert re.search(said, refusal(OSError, facts.dcgm_answer))
    stand_in(tmp_path, dcgmi='#!/bin/sh\necho "$@" {}; exit 1\n')
    assert facts.dcgm_answer() == "diag -r 1 -j {}\n"
    for text in ('{"DCGM Diagnostic": {"version": "4.2.3"}}', "no JSON"):
        assert re.search(r"no test|substring", refusal(ValueError, facts.dcgm_problems, text))


def test_this_machines_facts_are_read_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(tmp_path / "absent")
    stand_in(tmp_path, ninja="#!/bin/sh\necho 9.8.7\n", nvcc="#!/bin/sh\necho release 11.2, V11.2.9\n", pdsh="")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "x")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = facts.gather(
            {"ports": [port], "writable": [str(tmp_path), absent, str(tmp_path / "ninja")],
            "paths": [str(ROOT / "README.md"), absent],
             "names": ["localhost", "no-such-name.invalid"]}
        )  # fmt: skip
    assert found.keys() >= HEALTHY.keys()
    assert facts.gather({"ports": [port]})["ports"] == {str(port): True}
    assert (abs(found["time"] - time.time()) < 60, bool(found["packages"]["torch"])) == (True, True)
    assert (found["ports"], found["names"], found["hub_token"], found["contents"][absent]) == (
        {str(port): False}, {"localhost": ["127.0.0.1"], "no-such-name.invalid": []}, True, None,
    )  # fmt: skip
    assert [found["writable"][name]["error"] for name in (absent, str(tmp_path / "ninja"))] == [
        "No such file or directory", "Not a directory",
    ]  # fmt: skip
    assert (found["tools"]["nvcc"], found["tools"]["pdsh"]) == ("11.2", str(tmp_path / "pdsh"))
    as_sent = json.loads(json.dumps(found))
    assert min(as_sent["memory"]["MemAvailable"], as_sent["writable"][str(tmp_path)]["free_bytes"]) > 0
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho no number\n")
    assert facts.gather({})["tools"]["nvcc"] == str(tmp_path / "nvcc")


def test_one_byte_of_a_large_file_or_of_a_directory_changes_its_digest(tmp_path: Path) -> None:
    """Of its two ends; of the middle, its size alone."""
    file, large, end = tmp_path / "data.bin", 5 << 20, 1 << 20
    seen = [facts.digest(file)]
    for content in (
        b"",
        bytes(9),
        bytes(large),
        b"1" + bytes(large - 1),
        bytes(large - 1) + b"1",
        bytes(end - 1) + b"1",
    ):
        file.write_bytes(content.ljust(large if len(content) == end else 0, b"\0"))
        seen += [facts.digest(file), facts.digest(tmp_path)]
    assert (seen[0], len(set(seen))) == (None, len(seen))
    file.write_bytes(bytes(large // 2) + b"x" + bytes(large - large // 2 - 1))
    assert facts.digest(file) == seen[5]


# Requirements of a plan

TRAIN = ("/data/a.bin", "/data/a.idx")
ZEROS = ("torch", "transformers", "deepspeed", "accelerate")
REQUIRED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero3 to disks": (
        ZERO3 | {"cluster": "dgx-h100:2", "dp": 16, "offload_optimizer": "nvme"},
        {"packages": (*ZEROS, "s3fs"), "cuda": True, "gpus_per_node": 8, "cpu_adam": True, "num_nodes": 2},
    ),
    "zero3 to the host": (ZERO3 | {"offload_param": "cpu"}, {"cpu_adam": True, "nvme_gib": 0.0, "num_nodes": 1}),
    "zero2 to the host": (ZERO2 | {"offload_optimizer": "cpu"}, {"cpu_adam": True}),
    "zero2": (ZERO2 | {"cluster": "8xMI300X"}, {"cpu_adam": False, "cuda": False, "host_gib": 0.0}),
    "zero over megatron": (
        ZERO2 | {"dp": 2, "tp": 4, "implementation": "local"}, {"packages": (*ZEROS, "megatron-core", "s3fs")}
    ),
    "megatron": (
        DENSE | {"cluster": "16xH100", "offload_optimizer": "cpu"},
        {"packages": ("torch", "transformers", "megatron-core", "s3fs"), "cpu_adam": False},
    ),
    "fsdp2 on a part of a node": (
        FSDP2 | {"dp": 4}, {"packages": ("torch", "transformers", "s3fs"), "gpus_per_node": 4},
    ),
    "cpus": (FSDP2 | ON_CPU, {"cuda": False, "gpu_gib": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", REQUIRED)
def test_what_a_plan_asks_of_a_machine(case: str, tmp_path: Path) -> None:
    plan, expected = REQUIRED[case]
    made = plan_of("llama-3.2-1b", **plan)
    run = RunSpec(
        data=DataSpec(train="/data/a", validation="s3://bucket/b"), nvme_path="/disk", model_path="/m",
        checkpoint=CheckpointSpec(keep_last=3),
    )  # fmt: skip
    place, peak = tmp_path / "run", made.predicted.peak_gib
    found = requirements_of(write(made, run, place))
    expected = {
        "gpu_gib": peak, "nvme_gib": made.predicted.nvme_gib_per_node, "nvme_path": "/disk",
        "host_gib": made.predicted.host_ram_gib_per_node + 2 * peak * (case == "cpus"),
        "checkpoint_directory": str(place),
        "paths": (str(place / "plan.yaml"), str(place / "run.yaml"), *TRAIN, "/m/config.json"),
    } | expected  # fmt: skip
    assert {key: getattr(found, key) for key in expected} == expected
    # three that are kept, one more during a save, and the exchange
    assert found.checkpoints_gib == pytest.approx(5 * checkpoint_bytes(made.workload) / 2**30)
    alone = replace(run, data=DataSpec(blend={"x": BlendedSetSpec(path="/data/a", weight=1)}), model_path=None)
    asked = requirements_of(write(made, alone, tmp_path / "alone"))
    assert ("s3fs" in asked.packages, asked.paths[2:]) == (False, TRAIN)


# Several hosts


def several(count: int, **changes: Any) -> dict[str, dict[str, Any]]:
    """Healthy hosts; ``changes`` of each by its number, node_1 for the second."""
    return {f"node-{number}": copy.deepcopy(HEALTHY) | changes.get(f"node_{number}", {}) for number in range(count)}


def told(found: list[CheckResult]) -> list[tuple[str, tuple[str, ...], str]]:
    return [(result.state, result.hosts, result.said) for result in found]


def test_hosts_that_are_alike_pass() -> None:
    assert {result.state for between in hosts._BETWEEN for result in between(several(3))} == {"ok"}


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize(
    ("fact", "value", "state", "said"),
    [
        ("packages", HEALTHY["packages"] | {"torch": "2.9"}, "failure", "torch 2.9, 2.13 on {}"),
        ("packages", HEALTHY["packages"] | {"numpy": None}, "failure", "numpy not installed, 2.1 on {}"),
        ("kit", "b", "failure", "kit b, a on {}"),
        ("nccl", None, "failure", "nccl not installed, 2.27 on {}"),
        ("torch_cuda", "11.8", "failure", "torch_cuda 11.8, 12.8 on {}"),
        ("kernel", "5.4", "warning", "kernel 5.4, 6.8 on {}"),
        ("python", "3.12.1", "warning", "python 3.12.1, 3.11.7 on {}"),
        ("tools", HEALTHY["tools"] | {"g++": "9.1"}, "warning", "g++ 9.1, 12.2 on {}"),
    ],
)
def test_the_odd_host_is_named_beside_one_of_the_others(odd: int, fact: str, value: Any, state: str, said: str) -> None:
    assert told(hosts.versions(several(3, **{f"node_{odd}": {fact: value}}))) == [
        (state, (f"node-{odd}",), said.format("node-0" if odd else "node-1"))
    ]


def with_contents(*of_hosts: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    return several(3, **{f"node_{number}": {"contents": each} for number, each in enumerate(of_hosts)})


def with_names(**addresses: list[str]) -> dict[str, dict[str, Any]]:
    """What the second of two hosts knows; Debian maps a host's own name to 127.0.1.1."""
    others = {name.replace("_", "-"): each for name, each in addresses.items()}
    return several(
        2, node_0={"names": {"node-0": ["127.0.1.1"], "node-1": ["10.0.0.2"]}},
        node_1={"names": {"node-1": ["127.0.1.1"], **others}},
    )  # fmt: skip


BOTH, ALL = ("node-0", "node-1"), ("node-0", "node-1", "node-2")
OF_EIGHT = f"8 x {H100S}, driver 550.90.07"
A_AND_C = {"/data/a": "a", "/data/b": "c"}
KNOWN = ("ok", BOTH, "every host knows the others")
MARK = Path("/run/mark")
BETWEEN: list[tuple[Callable[..., list[CheckResult]], tuple[Any, ...], list[tuple[str, tuple[str, ...], str]]]] = [
    (hosts.versions, (several(1),), [("ok", ("node-0",), "one machine")]),
    (hosts.versions, (several(5, node_1={"nccl": "2.18.1"}, node_3={"nccl": "2.19.3"}, node_4={"nccl": "2.18.1"}),), [
        ("failure", ("node-1", "node-4"), "nccl 2.18.1, 2.27 on node-0"),
        ("failure", ("node-3",), "nccl 2.19.3, 2.27 on node-0"),
    ]),
    (hosts.machines, (several(3, node_1={"gpus": gpus(count=7)}, node_2={"gpus": gpus("550.90.07", "551.1", 5)}),), [
        ("failure", ("node-1",), f"GPUs 7 x {H100S}, driver 550.90.07, {OF_EIGHT} on node-0"),
        ("failure", ("node-2",), f"GPUs {OF_EIGHT}, 8 x {H100S}, driver 551.1, {OF_EIGHT} on node-0"),
    ]),
    (hosts.machines, (several(2) | {"x": HEALTHY | {"gpus": None}},), [
        ("failure", ("x",), f"GPUs not installed, {OF_EIGHT} on node-0"),
    ]),
    (hosts.contents, (with_contents(*[{"/data/a": "x"}] * 3),), [("ok", ALL, "1 files, the same everywhere")]),
    (hosts.contents, (with_contents(A_AND_C, A_AND_C | {"/data/a": "b"}, A_AND_C | {"/data/b": None}),), [
        ("failure", ("node-1",), "/data/a differs from that on node-0"),
        ("failure", ("node-2",), "/data/b is not there"),
    ]),
    # another host's name at an address of the loopback is a fault
    (hosts.names, (with_names(node_0=["10.0.0.1"]),), [KNOWN]),
    (hosts.names, (with_names(node_0=["127.0.0.2", "10.0.0.1"]),), [KNOWN]),
    (hosts.names, (with_names(node_0=["127.0.0.2"]),), [("failure", ("node-1",), "does not know node-0")]),
    (hosts.names, (with_names(node_0=[], node_9=[]),), [("failure", ("node-1",), "does not know node-0, node-9")]),
    # of two clocks the one that is wrong
    (hosts.clocks, ({"node-0": 0.0, "node-1": 1.0},), [("ok", BOTH, "within 1.00 s")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": 1.1},), [("warning", ("node-1",), "its clock is 1.1 s ahead")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": -1.1},), [("warning", ("node-1",), "its clock is 1.1 s behind")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": 60.0},), [("warning", ("node-1",), "its clock is 60.0 s ahead")]),
    (hosts.clocks, ({"node-0": 0.0, "node-1": -60.1},), [("failure", ("node-1",), "its clock is 60.1 s behind")]),
    (hosts.reach, ({"node-1": {"node-0": "No route to host"}, "node-0": {"node-1": None}}, 29501), [
        ("failure", ("node-1",), "cannot reach node-0 port 29501: No route to host"),
    ]),
    (hosts.reach, ({"node-1": {"node-0": None}, "node-0": {"node-1": None}}, 29501), [
        ("ok", ("node-1", "node-0"), "port 29501 of each other"),
    ]),
    (hosts._shared, ({"a": "x", "b": None}, MARK), [("failure", ("b",), "/run is not the same directory there")]),
    (hosts._shared, ({"a": "x", "b": "x"}, MARK), [("ok", ("a", "b"), "run is one directory")]),
]  # fmt: skip


@pytest.mark.parametrize(("between", "given", "said"), BETWEEN, ids=range(len(BETWEEN)))
def test_what_differs_between_hosts(between: Any, given: tuple[Any, ...], said: list[tuple[Any, ...]]) -> None:
    assert told(between(*given)) == said


# Other machines by ssh, for real but for ssh itself

SSH = """#!/bin/bash
[ "$1 $2 $3 $4" = "-o BatchMode=yes -o ConnectTimeout=5" ] || exit 9
case "$5" in gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255 ;; bare) exit 7 ;;
old) echo "ModuleNotFoundError: No module named 'kit'" >&2; exit 1 ;; esac
echo "a banner of the site"; exec bash -c "${@:6}"
"""
PORT = 29877


@pytest.fixture
def over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, ssh=SSH)["PATH"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("over_ssh")
def test_each_host_is_asked_by_ssh_and_one_that_does_not_answer_is_named() -> None:
    found, failed = remote.all_facts(
        [remote.Place(name) for name in ("here", "gone", "old", "bare")],
        {"ports": [PORT], "paths": [str(ROOT / "it's a path")]},
    )
    assert (list(found), found["here"]["contents"]) == (["here"], {str(ROOT / "it's a path"): None})
    fixes = ("by hand once", "same path", "there by hand")
    assert [(each.hosts, each.check, each.said, fix in each.fix) for each, fix in zip(failed, fixes, strict=True)] == [
        (("gone",), "ssh", "ssh: connect to host gone port 22: No route to host", True),
        (("old",), "environment", "ModuleNotFoundError: No module named 'kit'", True),
        (("bare",), "environment", "exit code 7", True),
    ]


def run_of(tmp_path: Path, **plan: Any) -> RunDirectory:
    run = RunSpec(data=DataSpec(train=str(tmp_path / "train")), nvme_path=str(tmp_path))
    return write(plan_of("llama-3.2-1b", **plan), run, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("over_ssh")
def test_two_hosts_are_examined_and_compared(tmp_path: Path) -> None:
    """Both are this machine, by two of its addresses: alike in all but their names, which lead nowhere else."""
    both = ["127.0.0.1", "127.0.0.2"]
    made = run_of(tmp_path, **TORCH, dp=4, cluster="2x2xcpu")
    found = {result.check: result for result in hosts.examine(both, made, PORT)}
    alike = {"shared-files", "versions", "machines", "clock", "reach", "port", "packages"}
    assert {check: (result.state, result.hosts) for check, result in found.items() if check in alike} == (
        dict.fromkeys(alike, ("ok", tuple(both)))
    )
    assert (found["shared-files"].said, found["names"].state, found["contents"].hosts) == (
        "run is one directory", "failure", tuple(both),
    )  # fmt: skip
    assert f"{tmp_path / 'train.bin'} is not there" in {r.said for r in hosts.examine(both, made, PORT)}
    assert not list(made.path.glob(".kit-doctor*"))
    alone = {result.check for result in hosts.examine([], made, PORT)}
    assert alone & {"hosts", "versions", "clock", "shared-files", "port"} == {"port"}
    three = states(hosts.examine([*both, "127.0.0.3"], made, PORT))
    assert three["hosts"] == ("failure", "3 hosts, and the plan has 2 nodes")
    with socket.create_server(("", PORT)):
        taken = {result.check: result.state for result in hosts.examine(both, None, PORT)}
    assert (taken["port"], "reach" in taken, "contents" in taken) == ("failure", False, True)
    assert sockets.connect(["127.0.0.1"], PORT, 1.0) == {"127.0.0.1": "Connection refused"}


RANK = """#!/bin/bash
[ "$1" = -c ] && { printf '\neth7\n'; exit; }
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME ${*:2}" >> "$SEEN"
[ -z "$FAULT" ] || { echo "Traceback"; echo "$FAULT" >&2; exit 3; }
echo "a warning"; echo '{"all_reduce_inside": 7.0, "write": 5.0, "read": 6.0}'
"""
MEASURED = "kit.addons.doctor.machines.measurements collectives"


@pytest.mark.slow
def test_ranks_of_a_measurement_are_told_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun does: beside a stand-in for the interpreter."""
    monkeypatch.setenv("PATH", stand_in(tmp_path, ssh=SSH, python=RANK)["PATH"])
    monkeypatch.setattr(remote.sys, "executable", str(tmp_path / "python"))
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    for plan, each, size in (
        (None, 2, 16 << 20),
        (plan_of(**TORCH, dp=4, cluster="2x2xcpu"), 2, 16 << 20),
        (plan_of(**ZERO2 | {"dp": 16}, cluster="hgx-h100:2"), 8, 256 << 20),
    ):
        found = bandwidth.collectives([remote.Place("node-0"), remote.Place("node-1")], plan, 29501)
        assert found["all_reduce_inside"] == 7.0
        assert sorted(seen.read_text().splitlines()) == sorted(
            f"{rank}/{2 * each} {rank % each}/{each} node-0:29501 eth7 {MEASURED} {size} 1.0"
            for rank in range(2 * each)
        )
        seen.unlink()
    here = [remote.Place("localhost")]
    bandwidth.collectives(here, None, 29501)
    assert min(seen.read_text().splitlines()).startswith("0/2 0/2 127.0.0.1:29501 lo ")
    assert bandwidth.collectives(here, plan_of(**TORCH, cluster="1xcpu"), 29501) == {}
    for name, layout in (("disk-speed", {}), ("nvme", {"offload_optimizer": "nvme"})):
        seen.unlink()
        made = run_of(tmp_path / name, **ZERO3 | {"dp": 2} | layout, cluster="2xcpu")
        judged = states(bandwidth.measure([], made, 29501))
        disk = made.run.nvme_path if layout else made.path
        assert f" kit.addons.doctor.machines.measurements disk {disk} {512 << 20}" in seen.read_text()
        assert ("5.0" in judged[name][1], judged["node-bandwidth"][1][:10]) == (True, "all_reduce")
        monkeypatch.setenv("FAULT", "no room")
        judged = states(bandwidth.measure([], made, 29501))
        assert (*judged[name], judged["collectives"][1]) == (
            "failure" if layout else "skipped", f"{disk}: no room", "did not run: no room",
        )  # fmt: skip
        monkeypatch.delenv("FAULT")


def test_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    for text, says in (
        ("", "no host in it"),
        ("# a\n\n", "no host in it"),
        ("a slots=1\nb\na slots=1\n", "a is listed tw"),
    ):
        file.write_text(text)
        assert re.search(says, refusal(SpecError, remote.read_hostfile, file))
    file.write_text("# c\n\n  # d\nb slots=8\na\n")
    assert remote.read_hostfile(file) == ["b", "a"]
    assert "No such file" in refusal(SpecError, remote.read_hostfile, tmp_path / "none")


# Speeds, judged by this plan


def states(found: list[CheckResult]) -> dict[str, tuple[str, str]]:
    return {result.check: (result.state, result.said) for result in found}


def test_a_slow_link_is_judged_by_this_plan() -> None:
    """A tenth of the fabric stops a plan that gathers weights over it; what its slowest collective reaches counts."""
    plan = plan_of(**ZERO3 | {"dp": 16, "cluster": "16xH100", "gradient_accumulation_steps": 1})
    inside = plan.cluster.intra_node_gbytes_per_s * bandwidth.shared().intra_node_link
    between = plan.cluster.inter_node_gbytes_per_s * bandwidth.shared().inter_node_link
    as_assumed = {"all_reduce_inside": inside, "all_gather_inside": 2 * inside, "all_reduce_between": between}
    ends = f": this plan's step takes 1.00 of its prediction ({plan.predicted.step_time_s:.3g} s)"
    both = f"all_reduce {inside:.2f} GB/s, all_gather {2 * inside:.2f} GB/s"
    assert states(bandwidth.judged(as_assumed, plan)) == {
        "node-bandwidth": ("ok", f"{both}; the plan assumed {inside:.2f}{ends}"),
        "fabric-bandwidth": ("ok", f"all_reduce {between:.2f} GB/s; the plan assumed {between:.2f}{ends}"),
        "host-copy": ("skipped", "no GPU to copy to: memory of the host is all there is"),
    }
    slow = states(bandwidth.judged(as_assumed | {"all_gather_inside": inside / 100}, plan))
    assert (slow["node-bandwidth"][0], slow["fabric-bandwidth"][0]) == ("failure", "ok")
    assert states(bandwidth.judged({"all_reduce_between": between / 30}, plan))["fabric-bandwidth"][0] == "failure"
    assert states(bandwidth.judged({"all_reduce_inside": 7.0, "host_to_device": 3.0}, None)) == {
        "node-bandwidth": ("ok", "all_reduce 7.00 GB/s (no plan to compare with)"),
        "fabric-bandwidth": ("skipped", "one rank between nodes: nothing to measure"),
        "host-copy": ("ok", "host to device 3.0 GB/s"),
    }


@pytest.mark.parametrize(("ratio", "state"), [(1.09, "ok"), (1.11, "warning"), (1.49, "warning"), (1.51, "failure")])
def test_a_step_that_is_longer_by_a_tenth_or_a_half(ratio: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(**ZERO2)
    steps = [replace(plan.predicted, step_time_s=seconds) for seconds in (1.0, ratio)]
    monkeypatch.setattr(bandwidth, "predict", Mock(side_effect=steps))
    assert told([bandwidth._slowdown("nvme", "1 GB/s", plan, plan.cluster, "node-1")]) == [
        (state, ("node-1",), f"1 GB/s: this plan's step takes {ratio:.2f} of its prediction ({ratio:.3g} s)")
    ]


SWAPPING = ZERO3 | {
    "cluster": replace(parse_cluster("dgx-h100"), nvme_gbytes_per_s=33.0), "offload_optimizer": "nvme",
}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "share", "disk", "copies"),
    [(SWAPPING, 1.0, "ok", "failure"), (SWAPPING, 0.005, "failure", "failure"), (ZERO3, 0.005, "ok", "ok")],
)
def test_copies_and_disks_are_judged_by_this_plan(plan: dict[str, Any], share: float, disk: str, copies: str) -> None:
    """A plan whose state is on NVMe lives on both; one that keeps all on the GPU needs neither."""
    made = plan_of(**plan)
    assumed = made.cluster.nvme_gbytes_per_s or 1.0
    found = bandwidth.judged_disk({"write": share * assumed, "read": 9 * assumed}, made, "node-1")
    assert (found.check, found.state, found.hosts, "1.00 of its prediction" in found.said) == (
        "nvme" if plan is SWAPPING else "disk-speed", disk, ("node-1",), share == 1.0,
    )  # fmt: skip
    state, said = states(bandwidth.judged({"host_to_device": 20.0, "device_to_host": 0.2}, made))["host-copy"]
    told = f"{made.cluster.gpu.pcie_gbytes_per_s * bandwidth.shared().host_link:.1f}"
    assert (state, said.partition(": ")[0]) == (
        copies, f"host to device 20.0, device to host 0.2 GB/s; the plan assumed {told}",
    )  # fmt: skip


def test_a_disk_is_measured(tmp_path: Path) -> None:
    try:
        found = measurements.disk_speed(tmp_path, 32 << 20)
    except OSError:
        pytest.skip("this file system refuses direct I/O: give pytest --basetemp on a disk")
    assert set(found) == {"write", "read"}
    assert 0 < min(found.values()) <= max(found.values()) < 100  # GB/s: something was written and read


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_bus_bandwidths_are_those_of_nccl_tests(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n of the bytes for an all-reduce, (n-1)/n for an all-gather. Two ranks on
    a node and four in all, in a group whose collectives do nothing and take half a second; rank 0 alone tells."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, ended = dist.init_process_group, Mock()
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: begin("fake", rank=rank, world_size=4, store=FakeStore())
    )
    monkeypatch.setattr(measurements.os, "_exit", ended)
    monkeypatch.setattr(measurements, "_seconds_each", lambda collective, seconds: (collective() and 0.5) or 0.5)
    for name, value in (("LOCAL_RANK", str(rank)), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    measurements.measure_collectives(1 << 20, 0.1)
    ended.assert_called_once_with(0)
    times = {"all_reduce_inside": 2, "all_gather_inside": 1, "all_reduce_between": 3, "all_gather_between": 1.5}
    expected = {name: size * (1 << 20) / 1e9 for name, size in times.items()}
    assert (json.loads(capsys.readouterr().out or "{}") == pytest.approx(expected)) == (rank == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 3), (7.5, 7), (1000.0, 200)])
def test_as_many_rounds_as_fit(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a collective that takes a second: three at least, two hundred at most, after two to warm up and to time."""
    import torch.distributed as dist

    clock, calls = iter(range(99)), []
    for name in ("barrier", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: float(next(clock)))
    assert measurements._seconds_each(lambda: calls.append(1), seconds) == pytest.approx(1 / rounds)
    assert len(calls) == 2 + rounds


def test_a_file_system_that_refuses_direct_io_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: str, flags: int, *rest: Any, **named: Any) -> None:
        if flags & os.O_DIRECT:
            raise OSError("Invalid argument")

    before(monkeypatch, os, "open", refusing)
    assert facts.free_bytes(tmp_path) > 0
    assert "tmpfs and overlays" in refusal(ValueError, facts.free_bytes, tmp_path, direct=True)


def test_a_listener_ends_with_its_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
    listener = threading.Thread(target=sockets.listen, args=(port, 30.0), daemon=True)
    listener.start()
    deadline = time.monotonic() + 10
    while sockets.connect(["127.0.0.1"], port, 1.0) != {"127.0.0.1": None} and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sockets.connect(["127.0.0.1", "127.0.0.2"], port, 1.0) == {"127.0.0.1": None, "127.0.0.2": None}
    os.close(writing)
    listener.join(5)
    assert (listener.is_alive(), capsys.readouterr().out) == (False, "listening\n")
    sockets.listen(port, 0.0)


def test_the_interpreter_of_another_host_finds_this_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, there in (("kit", str(Path("kit").resolve())), ("/a:b", "/a:b"), ("", "")):
        monkeypatch.setenv("PYTHONPATH", path)
        expected = [f"PYTHONPATH={there}"] * bool(path)
        assert remote.Place("localhost").words(["-m", "x"], {"A": "1"}) == [
            "env", "A=1", *expected, sys.executable, "-m", "x",
        ]  # fmt: skip
    assert remote.Place("node").words(["a b"])[-2:] == ["node", f"env {shlex.quote(sys.executable)} 'a b'"]


# How results are told


def test_failures_are_first_and_hosts_that_say_the_same_are_joined() -> None:
    joined = merged([
        ok("port", "free", "a"),
        failure("shm", "0.1 GiB free", "mount", "a"),
        failure("shm", "0.2 GiB free", "mount", "b"),
        warning("shm", "0.1 GiB free", "mount", "c"),
        failure("shm", "0.1 GiB free", "mount", "d"),
        skipped("dcgm", "not there"),
        *(ok("hub", "there", f"node-{n}") for n in range(5)),
    ])  # fmt: skip
    assert [(result.state, result.hosts) for result in joined] == [
        ("failure", ("a", "d")),
        ("failure", ("b",)),
        ("warning", ("c",)),
        ("skipped", ("localhost",)),
        ("ok", ("a",)),
        ("ok", tuple(f"node-{n}" for n in range(5))),
    ]
    lines = table(joined, 1.25).splitlines()
    assert [lines[number].split() for number in (0, 1, -2)] == [
        ["failure", "shm", "a,", "d", "0.1", "GiB", "free"], ["→", "mount"], ["ok", "hub", "5", "hosts", "there"],
    ]  # fmt: skip
    assert lines[-1] == "2 failure, 1 warning, 1 skipped, 2 ok; 1.2 s"
    assert refusal(RunDirectoryError, require, None, *joined) == "0.1 GiB free; mount\n0.2 GiB free; mount"
    require(None, *joined[2:])


def test_the_command_line_on_this_machine() -> None:
    done = kit_main("doctor", "--json")
    rows = json.loads(done.out)
    assert done.code == (1 if any(row["state"] == "failure" for row in rows) else 0)
    assert {"packages", "own-name", "shm", "ulimits", "port"} <= {row["check"] for row in rows}
    assert "without logs" in kit_refusal(["doctor", "x.log", "--bandwidth"])


@pytest.mark.nightly
def test_hosts_of_namespaces_differ_where_planted() -> None:
    """One fault of ``tests.system.preflight``: real hosts, a real difference; the only test here that
    needs root."""
    try:
        namespaces.check()
    except namespaces.NoNamespaces as error:
        pytest.skip(f"nothing was looked at over several hosts, which needs root: {error}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.preflight", "content"],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

"""Checks of a host (kit/addons/doctor/machines/host_checks), each asked about one fact on both sides of its limit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from kit.addons.doctor.machines.host_checks import CHECKS, check_host
from kit.addons.doctor.machines.needs import Requirements
from tests.addons.machines import H100S, HEALTHY, gpus
from tests.support.refusals import refusal

NEEDS = Requirements(
    packages=("torch", "transformers", "deepspeed", "accelerate"), cuda=True, gpus_per_node=8, gpu_gib=70.0,
    host_gib=100.0, cpu_adam=True, nvme_gib=50.0, num_nodes=2, paths=(), checkpoint_directory="/run",
    checkpoints_gib=300.0, nvme_path="/disk",
)  # fmt: skip
NO_PLAN: dict[str, Any] = {"no plan": True}
UNUSED = {"cpu_adam": False}
SETTING = {"test": "software", "gpu": "", "failed": False, "said": "persistence"}
FAULT = {"test": "memory", "gpu": "3", "failed": True, "said": "row remap failed"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str]] = [
    ("packages", {}, {}, "ok", "torch 2.13, transformers 5.23, deepspeed 0.19.8, accelerate 1.15", ""),
    ("packages", {"packages": {"torch": "2.13", "deepspeed": None}}, {}, "failure",
     "not installed: transformers, deepspeed, accelerate", "'deepspeed-megatron-kit[torch,deepspeed]' there"),
    ("packages", {"packages": {"torch": "2.13"}}, NO_PLAN, "ok", "torch 2.13", ""),
    ("packages", {"packages": {}}, NO_PLAN, "failure", "not installed: torch", "deepspeed-megatron-kit[torch]' there"),
    ("tested-versions", {}, {}, "ok", "none outside those tested", ""),
    ("tested-versions", {"packages": {"torch": "99.1"}}, NO_PLAN, "warning", "torch 99.1 is installed", "'torch>=2."),
    ("tested-versions", {"packages": {"torch": "1.13"}}, {}, "failure", "torch 1.13 is installed", "'torch>=2."),
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
    ("disk", {}, {}, "ok", "300.00 GiB fit; 50.00 GiB fit", ""),
    ("disk", {}, NO_PLAN, "skipped", "no plan", ""),
    ("disk", {}, {"checkpoints_gib": 300.1}, "failure", "/run: 300.0 GiB free, 300.1 needed for all",
    "keep_last"),
    ("disk", {}, {"nvme_gib": 50.1}, "failure", "/disk: 50.0 GiB free, 50.1 needed", ""),
    ("disk", {}, {"nvme_gib": 50.1, "nvme_path": None}, "ok", "", ""),
    ("disk", {"writable": {"/run": {"free_bytes": 1 << 60}}}, {"nvme_gib": 0.0}, "ok", "300.00 GiB fit", ""),
    ("disk", {"writable": {"/run": {"error": "Read-only"}}}, {}, "failure", "/run: Read-only",
    "elsewhere (--out)"),
    ("disk", {"writable": {}}, {}, "failure", "/run: not looked at", ""),
    ("host-memory", {"memory": {"error": "OSError: no /proc"}}, {}, "warning",
     "cannot be looked at (memory: OSError: no /proc)", "look there by hand ('MemAvailable')"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "change", "needs", "state", "said", "fix"), CASES, ids=[f"{case[0]}: {case[4]}" for case in CASES]
)
def test_a_check_of_a_host(
    check: str, change: dict[str, Any], needs: dict[str, Any], state: str, said: str, fix: str
) -> None:
    required = None if needs is NO_PLAN else replace(NEEDS, **needs)
    found = check_host({**copy.deepcopy(HEALTHY), **change}, required, "node-7")
    result = found[list(CHECKS).index(check)]
    assert (result.state, result.hosts, len(found)) == (state, ("node-7",), len(CHECKS))
    assert (said in result.said, fix in result.fix, bool(result.fix)) == (True, True, state in ("failure", "warning"))


def test_a_bug_of_a_check_is_no_fact_that_is_missing() -> None:
    assert refusal(KeyError, check_host, {**HEALTHY, "limits": {}}, NEEDS, "node-0") == "'nofile'"

"""Machines that the tests of the doctor share: healthy facts and GPUs, run directories, and a stand-in for ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.addons.doctor.machines import facts
from kit.emit.run_directory import RunDirectory, write
from kit.preflight.check_result import CheckResult
from kit.specs.run import DataSpec, RunSpec
from tests.emit.plans import plan_of

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
H100S = "NVIDIA H100 80GB HBM3"


def told(found: list[CheckResult]) -> list[tuple[str, tuple[str, ...], str]]:
    return [(result.state, result.hosts, result.said) for result in found]


SSH = """#!/bin/bash
[ "$1 $2 $3 $4" = "-o BatchMode=yes -o ConnectTimeout=5" ] || exit 9
case "$5" in gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255 ;; bare) exit 7 ;;
hung) exec sleep 9 ;; ahead) echo 4102444800.0; exit ;; behind) echo 400.0; exit ;;
old) echo "ModuleNotFoundError: No module named 'kit'" >&2; exit 1 ;; esac
echo "a banner of the site"; NODE=$5 exec bash -c "${@:6}"
"""


def run_of(tmp_path: Path, **plan: Any) -> RunDirectory:
    run = RunSpec(data=DataSpec(train=str(tmp_path / "train")), nvme_path=str(tmp_path))
    return write(plan_of("llama-3.2-1b", **plan), run, tmp_path / "run")


def states(found: list[CheckResult]) -> dict[str, tuple[str, str]]:
    return {result.check: (result.state, result.said) for result in found}

"""Checks of a machine's GPUs: driver, number, health, clocks and memory."""

from __future__ import annotations

from typing import Any

from kit.addons.doctor.machines.rows import Host, Of, Row, good
from kit.preflight.check_result import State

DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
"""CUDA's major version → oldest driver branch (docs.nvidia.com, CUDA compatibility, minor version compatibility)."""
HOT_C = 88.0
USED_MIB = 1024.0
"""GPU memory in use above which another process is reported; more than a leftover CUDA context."""


def _major(version: str | None) -> int:
    return int((version or "0").split(".")[0])


def _first_gpu(host: Host, fact: str, without: str) -> str:
    return str(host["gpus"][0][fact] if host["gpus"] else without)


def _smallest_gib(host: Host) -> float:
    return min((gpu["memory_total_mib"] or 0.0 for gpu in host["gpus"]), default=0.0) / 1024


def _fastest_mhz(host: Host) -> list[float]:
    return sorted({gpu["max_sm_mhz"] or 0 for gpu in host["gpus"]})


def _held_down(what: str, unit: str, fact: str, default: str, command: str) -> Row:
    """A setting of a GPU below its default. ``command``: sets it back."""
    return Row(
        "warning",
        lambda h: h.gpu[fact] is not None and h.gpu[default] is not None and h.gpu[fact] < h.gpu[default],
        lambda h: (
            f"GPU {h.gpu['index']}: its {what} is set to {h.gpu[fact]:.0f} {unit}, {h.gpu[default]:.0f} by default"
        ),
        lambda h: f"{command.format(h.gpu[default])}: every rank waits for the slowest",
    )


def _used_mib(host: Host) -> float:
    return float(host.gpu["memory_used_mib"] or 0)


def _free_gib(host: Host) -> float:
    return ((host.gpu["memory_total_mib"] or 0) - _used_mib(host)) / 1024


def _memory_taken(state: State, when: Of) -> Row:
    return Row(
        state,
        when,
        lambda h: (
            f"GPU {h.gpu['index']}: {_used_mib(h) / 1024:.1f} GiB are taken, {_free_gib(h):.1f} free"
            + (f", the plan takes {h.required.gpu_gib:.1f}" if h.required else "")
        ),
        "nvidia-smi shows whose process it is; a former run that did not end: kill it",
    )


def _problem(host: Host) -> dict[str, Any]:
    """DCGM's first fault, or else its first warning; empty if all tests passed."""
    problem: dict[str, Any] = min(host["dcgm"], key=lambda problem: not problem["failed"], default={})
    return problem


def _said_by_dcgm(host: Host) -> str:
    problem = _problem(host)
    where = f" (GPU {problem['gpu']})" if problem["gpu"] else ""
    return f"{problem['test']}{where}: {problem['said']}"


OF_EACH_GPU: dict[str, tuple[Row, ...]] = {
    # Uncorrected memory errors, rows pending retirement, and clocks throttled by heat or power.
    "gpu-health": (
        Row(
            "failure",
            lambda h: (h.gpu["uncorrected_ecc_errors"] or 0) > 0 or h.gpu["retired_pages_pending"],
            lambda h: (
                f"GPU {h.gpu['index']}: {h.gpu['uncorrected_ecc_errors'] or 0:.0f} uncorrected memory errors"
                + (", retirement pending" if h.gpu["retired_pages_pending"] else "")
            ),
            "reset the GPU (nvidia-smi -r) with no job on it; if they come back, drain the node",
        ),
        Row(
            "failure",
            lambda h: h.gpu["slowed_by_power"] or h.gpu["slowed_by_heat"] or (h.gpu["temperature_c"] or 0) >= HOT_C,
            lambda h: (
                f"GPU {h.gpu['index']}: slowed by its hardware at {h.gpu['sm_mhz']:.0f} of {h.gpu['max_sm_mhz']:.0f} "
                + ("MHz, temperature unknown" if (hot := h.gpu["temperature_c"]) is None else f"MHz, {hot:.0f} °C")
            ),
            "power or cooling: every rank waits for the slowest; drain the node",
        ),
    ),
    # A clock or power limit below its default.
    "gpu-clocks": (
        _held_down("clock", "MHz", "set_mhz", "default_mhz", "nvidia-smi -rac"),
        _held_down("power limit", "W", "power_limit_w", "default_power_limit_w", "nvidia-smi -pl {:.0f}"),
    ),
    # Memory that another process uses.
    "gpu-memory": (
        _memory_taken("failure", lambda h: _free_gib(h) < h.needs("gpu_gib", 0.0) and h.required),
        _memory_taken("warning", lambda h: _used_mib(h) > USED_MIB),
    ),
}
"""Rows that are asked of one GPU after the other, before those of ``GPU_CHECKS``."""
GPU_CHECKS: dict[str, tuple[Row, ...]] = {
    # torch's CUDA version beside the driver's, and beside nvcc's if DeepSpeed compiles operators.
    "cuda": (
        Row(
            "skipped",
            lambda h: not h.needs("cuda", True),
            "the plan is not for NVIDIA's GPUs, and kit reads nvidia-smi alone",
        ),
        Row(
            "failure",
            lambda h: h["gpus"] is None and h.required,
            "no nvidia-smi, and the plan is for GPUs",
            "install the driver, or plan for cpu",
        ),
        Row("skipped", lambda h: h["gpus"] is None, "no nvidia-smi"),
        Row(
            "failure",
            lambda h: isinstance(h["gpus"], dict),
            lambda h: h["gpus"]["error"],
            "the driver does not answer: dmesg, then reboot or drain the node",
        ),
        Row(
            "failure",
            lambda h: h["torch_cuda"] is None,
            "torch is built for CPUs",
            "install torch from the index of your CUDA version",
        ),
        Row(
            "failure",
            lambda h: _major(_first_gpu(h, "driver", "0")) < DRIVER_FOR_CUDA.get(_major(h["torch_cuda"]), 0),
            lambda h: f"torch is built for CUDA {h['torch_cuda']}, the driver is {_first_gpu(h, 'driver', '0')}",
            lambda h: (
                f"a driver of branch {DRIVER_FOR_CUDA[_major(h['torch_cuda'])]} or newer, or torch built for an older "
                "CUDA"
            ),
        ),
        Row(
            "failure",
            lambda h: (
                h.needs("cpu_adam") and h["tools"]["nvcc"] and _major(h["tools"]["nvcc"]) != _major(h["torch_cuda"])
            ),
            lambda h: f"nvcc is {h['tools']['nvcc']} and torch is built for CUDA {h['torch_cuda']}: DeepSpeed refuses",
            lambda h: f"CUDA toolkit {h['torch_cuda']}, or DS_SKIP_CUDA_CHECK=1 if you know that they agree",
        ),
        good(
            lambda h: (
                f"torch for CUDA {h['torch_cuda']}, driver {_first_gpu(h, 'driver', '0')}, NCCL "
                f"{h['nccl'] or 'of torch'}"
            )
        ),
    ),
    # As many GPUs and as much memory on each as the plan has.
    "gpus": (
        Row(
            "skipped",
            lambda h: not h.needs("cuda") or not isinstance(h["gpus"], list),
            "no plan for NVIDIA's GPUs, or none here",
        ),
        Row(
            "failure",
            lambda h: len(h["gpus"]) < h.needs("gpus_per_node"),
            lambda h: f"{len(h['gpus'])} GPUs, the plan has {h.needs('gpus_per_node')} a node",
            "look for a GPU that fell off the bus (dmesg, Xid 79); drain the node, or plan for fewer",
        ),
        Row(
            "failure",
            lambda h: _smallest_gib(h) < h.needs("gpu_gib"),
            lambda h: (
                f"{_first_gpu(h, 'name', 'no GPU')} has {_smallest_gib(h):.1f} GiB, the plan's peak is "
                f"{h.needs('gpu_gib'):.1f}"
            ),
            "plan for the GPUs that are there: kit plan RECIPE cluster=local",
        ),
        good(lambda h: f"{len(h['gpus'])} x {_first_gpu(h, 'name', 'no GPU')}, {_smallest_gib(h):.1f} GiB"),
    ),
    "gpu-health": (
        good(lambda h: f"no memory errors, not slowed, {max(gpu['temperature_c'] or 0 for gpu in h['gpus']):.0f} °C"),
    ),
    "gpu-clocks": (
        Row(
            "warning",
            lambda h: len(_fastest_mhz(h)) > 1,
            lambda h: f"GPUs of {', '.join(f'{mhz:.0f}' for mhz in _fastest_mhz(h))} MHz at most",
            "every rank waits for the slowest: leave it out (CUDA_VISIBLE_DEVICES)",
        ),
        good(lambda h: f"up to {_fastest_mhz(h)[-1]:.0f} MHz, nothing held down"),
    ),
    # NVIDIA's quick diagnosis, if it is installed.
    "dcgm": (
        Row("skipped", lambda h: h["dcgm"] is None, "dcgmi is not installed; nvidia-smi's figures stand alone"),
        Row(
            "warning",
            lambda h: isinstance(h["dcgm"], dict),
            lambda h: h["dcgm"]["error"],
            "systemctl status nvidia-dcgm",
        ),
        Row(
            "failure",
            lambda h: _problem(h).get("failed"),
            _said_by_dcgm,
            "dcgmi diag -r 3 with no job on it; if it fails again, drain the node",
        ),
        Row("warning", _problem, _said_by_dcgm, "a setting of the node: mend it, then dcgmi diag -r 1"),
        good("its quick tests pass"),
    ),
    "gpu-memory": (good("all free"),),
}

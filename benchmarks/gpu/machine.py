"""Describes this machine: hardware, versions, commit. Every measurement carries the description."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron-core",
    "transformer-engine",
    "bitsandbytes",
    "peft",
    "liger-kernel",
    "triton",
    "deepspeed-megatron-kit",
)


RESULTS = ":(top,exclude)benchmarks/results"
COPIED_FROM = "KIT_COMMIT"
"""Environment variable with the commit of a copy without a .git directory."""


def describe(device: str) -> dict[str, Any]:
    """Date, hardware, driver, versions and commit; unknown values are None.

    ``changed``: whether tracked files other than results differ from the commit. ``load``: load average of the last
    minute.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output(["git", "rev-parse", "HEAD"]) or os.environ.get(COPIED_FROM),
        "changed": _output(["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", RESULTS]) is not None,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": device,
        "hardware": _gpu() if device == "cuda" else {"processor": platform.machine(), "cores": os.cpu_count()},
    }


def _version(name: str) -> str | None:
    """Of the copy that Python imports: a folder of wheels may lie before what is installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any] | None:
    """The GPU, read from the driver, because torch's context would take memory from the measurements."""
    fields = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "power.limit")
    listed = _output(["nvidia-smi", f"--id={gpu_id()}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    return None if listed is None else dict(zip(fields, (word.strip() for word in listed.split(",")), strict=False))


def gpu_id() -> str:
    """Index or UUID of the measured GPU, the first visible one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=20, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None

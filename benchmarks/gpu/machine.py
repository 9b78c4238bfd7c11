"""Which machine this is: hardware, versions, commit. Goes beside every measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "megatron-core", "kit")


def describe(device: str) -> dict[str, Any]:
    """Date, hardware, driver, versions and commit; what cannot be known is null."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output(["git", "rev-parse", "HEAD"]),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": device,
        "hardware": _gpu() if device == "cuda" else {"processor": platform.machine()},
    }


def _gpu() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "cuda": torch.version.cuda,
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=20, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None

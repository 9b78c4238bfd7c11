"""Facts of one machine, gathered on it: ``python -m kit.addons.doctor.machines.facts REQUEST`` prints them as JSON.

It only reads facts; ``host_checks`` and ``hosts`` judge them. Imports no torch: versions come from package
metadata, torch's CUDA version from its version.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.preflight.requirements import free_bytes
from kit.preflight.versions import LEGS, installed_version
from kit.specs.local import host_memory, nvidia_smi

_GPUS_LIMIT_S = 10


def _number(text: str) -> float | None:
    """The number in a field; None if the driver does not report it: "[N/A]", "[Not Supported]"."""
    with contextlib.suppress(ValueError):
        return float(text)
    return None


_GPU_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "index": ("index", int),
    "name": ("name", str),
    "driver": ("driver_version", str),
    "memory_total_mib": ("memory.total", _number),
    "memory_used_mib": ("memory.used", _number),
    "uncorrected_ecc_errors": ("ecc.errors.uncorrected.volatile.total", _number),
    "sm_mhz": ("clocks.current.sm", _number),
    "max_sm_mhz": ("clocks.max.sm", _number),
    "slowed_by_power": ("clocks_throttle_reasons.hw_slowdown", "Active".__eq__),
    "slowed_by_heat": ("clocks_throttle_reasons.hw_thermal_slowdown", "Active".__eq__),
    "temperature_c": ("temperature.gpu", _number),
    "retired_pages_pending": ("retired_pages.pending", "Yes".__eq__),
    "persistence": ("persistence_mode", "Enabled".__eq__),
    # The application clock (nvidia-smi -ac), and its default.
    "set_mhz": ("clocks.applications.graphics", _number),
    "default_mhz": ("clocks.default_applications.graphics", _number),
    "power_limit_w": ("power.limit", _number),
    "default_power_limit_w": ("power.default_limit", _number),
}
"""kit's name → (field of ``nvidia-smi --help-query-gpu``, parser of its text)."""


def _query_gpus() -> str | None:
    """Output of nvidia-smi; None if it is not installed. Raises OSError, or TimeoutExpired if the driver hangs."""
    fields = ",".join(field for field, _ in _GPU_FIELDS.values())
    return nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", limit_s=_GPUS_LIMIT_S)


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Rows of ``_query_gpus``, by the names of ``_GPU_FIELDS``."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        {name: read(cell) for (name, (_, read)), cell in zip(_GPU_FIELDS.items(), row, strict=True)} for row in rows
    ]


_PACKAGES = (*LEGS["newest"]["packages"], "numpy", "safetensors", "tokenizers")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
TOOLS = ("g++", "gcc", "nvcc", "ninja", "pdsh", "ssh", "ip", "ibstat", "fi_info", "srun", "mpirun")
LIMITS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC", "stack": "RLIMIT_STACK"}
HASHED_BYTES = 1 << 20
"""Bytes that are read at each end of a large file. Its size is compared as well."""
_DCGM_LIMIT_S = 15
_A_SETTING = 5
"""dcgm_errors.h, DCGM_ERROR_CONFIG: a setting of the node (persistence mode, …), not a fault of its hardware."""


Facts = dict[str, Any]


def gather(request: dict[str, Any]) -> Facts:
    """All facts of this machine. ``request``: ``paths`` to compare, ``writable`` directories, ``names`` to resolve,
    ``ports`` to bind. A fact that cannot be read is ``{"error": why}``."""
    facts: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "addresses_of_own_name": lambda: _resolve(socket.gethostname()),
        # Addresses of this machine's interfaces, without loopback.
        "addresses": lambda: _output("hostname", "-I").split(),
        "names": lambda: {name: _resolve(name) for name in request.get("names", [])},
        "python": platform.python_version,
        "packages": lambda: {name: installed_version(name) for name in _PACKAGES},
        "kit": _kit_digest,
        "torch_cuda": _torch_cuda,
        "nccl": lambda: next(filter(None, map(installed_version, _NCCL)), None),
        "kernel": platform.release,
        "tools": lambda: {name: _tool(name) for name in TOOLS},
        "libaio": lambda: any(Path(root, "libaio.h").exists() for root in ("/usr/include", "/usr/local/include")),
        "gpus": lambda: None if (text := _query_gpus()) is None else parse_gpus(text),
        "dcgm": lambda: None if (text := dcgm_answer()) is None else dcgm_problems(text),
        "memory": host_memory,
        "shm_free_bytes": lambda: shutil.disk_usage("/dev/shm").free,
        "limits": lambda: {name: resource.getrlimit(getattr(resource, key))[0] for name, key in LIMITS.items()},
        "hub_token": lambda: bool(os.environ.get("HF_TOKEN")) or (Path.home() / ".cache/huggingface/token").is_file(),
        "contents": lambda: {path: digest(Path(path)) for path in request.get("paths", [])},
        "writable": lambda: {path: _writable(Path(path)) for path in request.get("writable", [])},
        "ports": lambda: {str(port): _port_is_free(port) for port in request.get("ports", [])},
    }
    return {name: _or_error(read) for name, read in facts.items()}


def digest(path: Path) -> str | None:
    """Size and hash of a file (of a large file: of its two ends), or of all files of a directory; None if the path does
    not exist."""
    if path.is_dir():
        parts = [f"{file.name}:{digest(file)}" for file in sorted(path.iterdir()) if file.is_file()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        size = path.stat().st_size
        read = hashlib.sha256(stream.read(HASHED_BYTES))
        stream.seek(max(HASHED_BYTES, size - HASHED_BYTES))
        read.update(stream.read(HASHED_BYTES))
        return f"{size}-{read.hexdigest()[:16]}"
    return None


def _or_error(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _kit_digest() -> str:
    """Hash of kit's own sources, because a checkout's version says nothing about edits."""
    root = Path(__file__).parents[3]
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda[^=]*= '([\d.]+)'", text, flags=re.MULTILINE)
    return match.group(1) if match else None


def _tool(name: str) -> str | None:
    """Version of a program (its path if no version is wanted); None if it is not installed. Searches the venv too."""
    path = shutil.which(
        name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/cuda/bin"
    )
    if path is None or name not in ("g++", "nvcc", "ninja"):
        return path
    match = re.search(r"release (\d+\.\d+)|(\d+\.\d+(?:\.\d+)*)", _output(path, "--version"))
    return (match.group(1) or match.group(2)) if match else path


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout


def _resolve(name: str) -> list[str]:
    with contextlib.suppress(socket.gaierror):
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, family=socket.AF_INET)})
    return []


def _writable(path: Path) -> dict[str, Any]:
    """Whether files can be written to a directory, and its free space."""
    try:
        return {"free_bytes": free_bytes(path)}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _port_is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def dcgm_answer() -> str | None:
    """Output of NVIDIA's DCGM, ``dcgmi diag -r 1 -j``: tests of libraries, permissions, page retirement and the GPU's
    records. They take seconds and disturb no job. None if DCGM is not installed.

    Raises OSError, or TimeoutExpired if its daemon hangs."""
    try:
        done = subprocess.run(["dcgmi", "diag", "-r", "1", "-j"], capture_output=True, text=True, timeout=_DCGM_LIMIT_S)
    except FileNotFoundError:
        return None
    if "{" not in done.stdout:  # a failed test also gives an exit code other than 0
        raise OSError(f"dcgmi: {(done.stdout + done.stderr).strip()[:200] or f'exit code {done.returncode}'}")
    return done.stdout


def dcgm_problems(text: str) -> list[dict[str, Any]]:
    """Tests that did not pass: ``test`` (name); ``gpu`` (indices; empty for a test of the machine); ``failed`` (False
    for a warning or a setting); ``said`` (message).

    The JSON differs between versions: "DCGM GPU Diagnostic" with "gpu_ids" (3.x) or "DCGM Diagnostic" with entities
    (4.x); warnings are texts or objects with a severity. So kit searches the whole tree for tests
    (github.com/NVIDIA/DCGM, nvvs/src/JsonOutput and testing/python3/tests, read 2026-11-22).

    Raises ValueError if there is no JSON, or no test in it."""
    data = json.loads(text[text.index("{") : text.rindex("}") + 1])
    tests = list(_tests(data))
    if not tests:
        raise ValueError("dcgmi's answer holds no test")
    return [problem for test in tests for result in test["results"] if (problem := _problem(test, result))]


def _tests(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict) and isinstance(node.get("results"), list) and "name" in node:
        yield node
    elif isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _tests(inner)


def _problem(test: dict[str, Any], result: dict[str, Any]) -> dict[str, Any] | None:
    status = str(result.get("status", "")).lower()
    if not status.startswith(("fail", "warn", "error")):
        return None
    told = result.get("warnings") or result.get("info") or "no reason given"
    warnings = [
        each if isinstance(each, dict) else {"warning": each} for each in (told if isinstance(told, list) else [told])
    ]
    is_setting = all(each.get("error_severity") == _A_SETTING for each in warnings)
    return {
        "test": str(test["name"]),
        "gpu": str(result.get("gpu_ids", result.get("entity_id", ""))),
        "failed": not status.startswith("warn") and not is_setting,
        "said": "; ".join(str(each.get("warning", each)) for each in warnings)[:300],
    }


if __name__ == "__main__":
    print(json.dumps(gather(json.loads(sys.argv[1]))))

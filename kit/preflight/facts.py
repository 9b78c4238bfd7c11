"""Facts of one machine, gathered on it: ``python -m kit.preflight.facts REQUEST`` prints them as JSON.

Reads; judges nothing. Imports no torch: versions come from package metadata, torch's CUDA version from its version.py.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit.preflight import dcgm, gpus

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "megatron-core", "numpy", "safetensors", "tokenizers")
TOOLS = ("g++", "gcc", "nvcc", "ninja", "pdsh", "ssh", "ip", "ibstat", "fi_info", "srun", "mpirun")
LIMITS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC", "stack": "RLIMIT_STACK"}
HASHED_BYTES = 1 << 20
"""Of a large file only the first and last so many bytes are read; its size is compared as well."""


def gather(request: dict[str, Any]) -> dict[str, Any]:
    """Everything about this machine. ``request``: ``paths`` to compare, ``writable`` directories, ``names`` to resolve,
    ``ports`` to bind. A fact that cannot be had is ``{"error": why}`` in its place."""
    facts: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "addresses_of_own_name": lambda: _resolve(socket.gethostname()),
        "addresses": _addresses,
        "names": lambda: {name: _resolve(name) for name in request.get("names", [])},
        "python": platform.python_version,
        "packages": lambda: {name: _version(name) for name in PACKAGES},
        "kit": _kit_digest,
        "torch_cuda": _torch_cuda,
        "nccl": _nccl,
        "kernel": platform.release,
        "tools": lambda: {name: _tool(name) for name in TOOLS},
        "libaio": lambda: any(Path(root, "libaio.h").exists() for root in ("/usr/include", "/usr/local/include")),
        "gpus": lambda: None if (text := gpus.query()) is None else [asdict(gpu) for gpu in gpus.parse(text)],
        "dcgm": lambda: None if (text := dcgm.query()) is None else [asdict(problem) for problem in dcgm.parse(text)],
        "memory": _memory,
        "shm_free_bytes": lambda: shutil.disk_usage("/dev/shm").free,
        "limits": lambda: {name: resource.getrlimit(getattr(resource, key))[0] for name, key in LIMITS.items()},
        "cores": lambda: len(os.sched_getaffinity(0)),
        "hub_token": lambda: bool(os.environ.get("HF_TOKEN")) or (Path.home() / ".cache/huggingface/token").is_file(),
        "hub_offline": lambda: os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True"),
        "contents": lambda: {path: digest(Path(path)) for path in request.get("paths", [])},
        "writable": lambda: {path: _writable(Path(path)) for path in request.get("writable", [])},
        "ports": lambda: {str(port): _port_is_free(port) for port in request.get("ports", [])},
    }
    found = {name: _or_error(read) for name, read in facts.items()}
    return {**found, "time": time.time()}


def digest(path: Path) -> str | None:
    """Size and hash of a file (its ends, where it is large), or of all files of a directory; None where nothing is."""
    if path.is_dir():
        parts = [f"{file.name}:{digest(file)}" for file in sorted(path.iterdir()) if file.is_file()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            read = hashlib.sha256(stream.read(HASHED_BYTES))
            if size > HASHED_BYTES:
                stream.seek(max(HASHED_BYTES, size - HASHED_BYTES))
                read.update(stream.read(HASHED_BYTES))
    except FileNotFoundError:
        return None
    return f"{size}-{read.hexdigest()[:16]}"


def _or_error(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kit_digest() -> str:
    """Of kit's own sources: a checkout has no version that tells."""
    root = Path(__file__).parents[1]
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


def _nccl() -> str | None:
    return next(
        (v for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11") if (v := _version(name))), None
    )


def _tool(name: str) -> str | None:
    """Its version, or its path where it does not say; None where it is not installed. A venv's own programs count."""
    path = shutil.which(
        name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/cuda/bin"
    )
    if path is None or name not in ("g++", "nvcc", "ninja"):
        return path
    told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    match = re.search(r"release (\d+\.\d+)|(\d+\.\d+(?:\.\d+)*)", told)
    return (match.group(1) or match.group(2)) if match else path


def _memory() -> dict[str, int]:
    """Bytes: MemTotal, MemAvailable."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if key in ("MemTotal", "MemAvailable")}


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, family=socket.AF_INET)})
    except socket.gaierror:
        return []


def _addresses() -> list[str]:
    """Of this machine's interfaces, without loopback."""
    told = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10).stdout
    return told.split()


def _writable(path: Path) -> dict[str, Any]:
    """Whether files can be made there, and how much room there is."""
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".kit-doctor-") as probe:
            probe.write(b"x")
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"free_bytes": shutil.disk_usage(path).free}


def _port_is_free(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def main(words: list[str]) -> None:
    """``REQUEST``, JSON."""
    print(json.dumps(gather(json.loads(words[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The machine that this process runs on, as a cluster of one node. Asks nvidia-smi and Linux; imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kit.errors import SpecError
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.units import GIB

_SECTOR_BYTES = 512
"""Unit of /sys/block/*/size, whatever the disk's own sectors are (Linux, Documentation/block/stat.rst)."""


def local_cluster(gpus: dict[str, GpuSpec]) -> ClusterSpec:
    """GPUs as nvidia-smi lists them, else one CPU process a core; host memory; NVMe disks; this environment's packages.

    ``gpus``: the catalog. Raises SpecError for a GPU that it has not, and for GPUs of several kinds.
    """
    total = host_memory().get("MemTotal")
    ram_gib = total / GIB if total else None
    disks = {path.parent.name: int(_text(path) or 0) for path in Path("/sys/block").glob("nvme*/size")}
    listed = nvidia_gpus()
    if listed:
        gpu, count = listed_gpu(listed, gpus)
        linked = has_nvlink(_asked("topo", "-m")) and gpu.nvlink_gbytes_per_s > 0
        link = gpu.nvlink_gbytes_per_s if linked else gpu.pcie_gbytes_per_s
    else:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        gpu = dataclasses.replace(gpus["cpu"], memory_gib=(ram_gib or 4.0 * count) / count)
        link = gpus["cpu"].pcie_gbytes_per_s
    return ClusterSpec(
        name=os.uname().nodename,
        gpu=gpu,
        gpus_per_node=count,
        num_nodes=1,
        intra_node_gbytes_per_s=link,
        inter_node_gbytes_per_s=0.0,
        host_ram_gib=ram_gib,
        transformer_engine=bool(listed) and importlib.util.find_spec("transformer_engine") is not None,
        nvme_gib=sum(disks.values()) * _SECTOR_BYTES / GIB,
        source="this machine: nvidia-smi, /proc/meminfo, /sys/block; speeds as in the catalog",
    )


def listed_gpu(listed: Sequence[tuple[str, float]], gpus: dict[str, GpuSpec]) -> tuple[GpuSpec, int]:
    """Names and GiB of ``nvidia_gpus`` → the GPU, with the memory that is really there, and how many.

    Raises SpecError as ``local_cluster``.
    """
    kinds, memory_gib = sorted({name for name, _ in listed}), min(gib for _, gib in listed)
    if len(kinds) > 1:
        raise SpecError(
            f"this machine has GPUs of several kinds ({', '.join(kinds)}), and a plan uses equal ones; describe the "
            "part to use in a YAML file, and hide the rest with CUDA_VISIBLE_DEVICES"
        )
    # Words of the catalog's name must all stand in the driver's: H100 in "NVIDIA H100 80GB HBM3".
    words = _words(kinds[0])
    fitting = [gpu for gpu in gpus.values() if gpu.device == "cuda" and _model_words(gpu.name) <= words]
    fitting = [gpu for gpu in fitting if abs(gpu.memory_gib / memory_gib - 1) < 0.1]
    if not fitting:
        raise SpecError(
            f"GPU {kinds[0]!r} with {memory_gib:.0f} GiB is not in the catalog; describe the cluster in a YAML file "
            "with a gpu section (memory_gib, bf16_tflops, hbm_gbytes_per_s, …)"
        )
    best = max(fitting, key=lambda gpu: len(_model_words(gpu.name)))
    # torch sees less than nvidia-smi counts; the catalog's figure is torch's.
    return dataclasses.replace(best, memory_gib=min(best.memory_gib, memory_gib)), len(listed)


def is_gpu(gpu: GpuSpec, driver_name: str) -> bool:
    """Whether the driver's name (``NVIDIA H100 80GB HBM3``) is one of this model's, whatever its memory."""
    return _model_words(gpu.name) <= _words(driver_name)


def nvidia_gpus() -> list[tuple[str, float]] | None:
    """(name, GiB) of each GPU that nvidia-smi lists; None where it is not there or fails."""
    listed = _asked("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    rows = [line.rsplit(",", 1) for line in listed.splitlines() if line.strip()]
    return [(name.strip(), int(mebibytes) / 1024) for name, mebibytes in rows] or None


def has_nvlink(topology: str) -> bool:
    """Whether ``nvidia-smi topo -m`` shows bonded links (``NV18``) between GPUs."""
    return re.search(r"^GPU\d+.*\bNV\d+\b", topology, flags=re.MULTILINE) is not None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+[0-9]*[a-z]*|[0-9]+[a-z]*", name.lower()))


def _model_words(name: str) -> set[str]:
    """Words of a catalog name, without the memory size (A100-80) and the product line (RTX)."""
    sized = re.fullmatch(r"([AV]\d+)-\d+", name)
    return _words(sized.group(1) if sized else name) - {"rtx"}


def nvidia_smi(*args: str, limit_s: float = 20) -> str | None:
    """What it prints; None where it is not installed. Raises OSError where it fails (no driver), TimeoutExpired where a
    sick driver hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, *args], capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        raise OSError(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:200]}")
    return done.stdout


def host_memory() -> dict[str, int]:
    """Bytes by Linux's names: MemTotal, and MemAvailable, which can be taken without swapping; empty elsewhere."""
    pairs = re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB", _text(Path("/proc/meminfo")), flags=re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in pairs}


def _asked(*args: str) -> str:
    """What nvidia-smi prints; empty where it is not there or fails."""
    try:
        return nvidia_smi(*args) or ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def user_cache(what: str) -> Path:
    """Directory of what can be had again (XDG base directory specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "kit" / what

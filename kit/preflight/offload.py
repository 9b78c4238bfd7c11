"""What this machine must have for a plan that offloads: host memory, and a disk for swap files. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from ctypes.util import find_library
from pathlib import Path

from kit.errors import EngineError, RunDirectoryError
from kit.planner.plan import Plan
from kit.specs.run import RunSpec
from kit.units import GIB, to_gib

NO_LIBAIO = (
    "offload to nvme needs libaio with its headers, which this machine lacks; "
    "install libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"
)


def uses_nvme(plan: Plan) -> bool:
    """Whether the layout keeps anything on NVMe."""
    return "nvme" in (plan.layout.offload_optimizer, plan.layout.offload_param)


def swap_directory(plan: Plan, run: RunSpec, run_directory: Path) -> Path | None:
    """The folder for swap files: below ``run.nvme_path``, and this run's own, so that two runs never share one.

    DeepSpeed names its files by rank and parameter alone, and empties what it finds. Raises RunDirectoryError where the
    layout needs a path and the run has none.
    """
    if not uses_nvme(plan):
        return None
    if run.nvme_path is None:
        raise RunDirectoryError(
            "run.nvme_path is missing, and the layout offloads to nvme; give a directory on the node's own disk, "
            "for example run.nvme_path=/mnt/nvme"
        )
    return Path(run.nvme_path) / f"kit-{hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:12]}"


def check_nvme(plan: Plan, run: RunSpec, run_directory: Path) -> None:
    """The disk is there, writable, takes direct I/O and has room. Raises RunDirectoryError."""
    folder = swap_directory(plan, run, run_directory)
    if folder is None:
        return
    path = folder.parent
    if not path.is_dir():
        raise RunDirectoryError(
            f"run.nvme_path={path}: no such directory on {os.uname().nodename}; mount the disk there"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".kit-probe-") as probe:
            _open_directly(path, probe.name)
    except OSError as error:
        raise RunDirectoryError(
            f"run.nvme_path={path}: not writable on {os.uname().nodename} ({error.strerror}); give a directory that is"
        ) from None
    needed = plan.predicted.nvme_gib_per_node
    free = to_gib(shutil.disk_usage(path).free)
    # What an earlier attempt of this run left is overwritten, not added to.
    free += to_gib(sum(file.stat().st_size for file in folder.rglob("*.swp"))) if folder.is_dir() else 0.0
    if free < needed:
        raise RunDirectoryError(
            f"run.nvme_path={path}: {free:.2f} GiB free on {os.uname().nodename} and the swap files take {needed:.2f}; "
            "make room, or give another disk"
        )


def _open_directly(path: Path, name: str) -> None:
    """libaio opens with O_DIRECT, which file systems in memory refuse."""
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        raise RunDirectoryError(f"run.nvme_path={path}: this system has no direct I/O; NVMe offload needs Linux")
    try:
        os.close(os.open(name, os.O_RDWR | direct))
    except OSError:
        raise RunDirectoryError(
            f"run.nvme_path={path}: its file system refuses direct I/O (tmpfs and overlays do); "
            "give a directory on a disk"
        ) from None


def check_libaio(plan: Plan) -> None:
    """What DeepSpeed's swapping is built on, before any process imports DeepSpeed. Raises EngineError."""
    if uses_nvme(plan) and find_library("aio") is None:
        raise EngineError(NO_LIBAIO)


def check_host_memory(plan: Plan) -> None:
    """The predicted host memory is free now, before anything is loaded. Raises RunDirectoryError."""
    needed = plan.predicted.host_ram_gib_per_node
    if not needed:
        return
    if plan.cluster.gpu.device == "cpu":
        needed += plan.predicted.peak_gib * plan.layout.world_size / plan.cluster.num_nodes
    available = available_gib()
    if available is not None and available < needed:
        raise RunDirectoryError(
            f"offload needs {needed:.1f} GiB of host memory a node, and {os.uname().nodename} has {available:.1f} "
            "available; end other programs, use more nodes, or offload to nvme"
        )


def available_gib() -> float | None:
    """Memory that can be taken without swapping, as Linux estimates it; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / GIB
    return None

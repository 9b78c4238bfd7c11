"""Checks whether this machine has what a plan and its run require."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path

from kit.emit.launch import processes_per_node
from kit.planner.plan import Plan
from kit.preflight.check_result import CheckResult, failure
from kit.preflight.versions import installed_version, numbers
from kit.specs.catalog import gpu_names
from kit.specs.local import host_memory, is_gpu, nvidia_gpus
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.run import RunSpec
from kit.units import to_gib

PACKAGES = {
    "torch": ("torch", "transformers"),
    "deepspeed": ("torch", "transformers", "deepspeed", "accelerate"),
    "megatron": ("torch", "transformers"),
}
"""Engine → packages that it imports (without Megatron's layers); the extra of the same name installs them."""
MEMORY_SLACK = 0.97
"""Share of the planned memory that a GPU must report: drivers reserve different amounts."""
NO_LIBAIO = "offload to nvme needs libaio with its headers, which this machine lacks"
INSTALL_LIBAIO = "install libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"


def free_bytes(directory: Path, direct: bool = False) -> int:
    """Free bytes on the disk of a directory, after a test that writes a file there.

    Raises OSError if no file can be written. With ``direct``, raises ValueError if the file system refuses direct I/O,
    which libaio needs (O_DIRECT: only on Linux, and not on tmpfs and overlays).
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".kit-preflight-") as file:
        if direct:
            try:
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
            except (AttributeError, OSError):
                raise ValueError("tmpfs and overlays do, and systems other than Linux") from None
    return shutil.disk_usage(directory).free


def host_gib(plan: Plan) -> float:
    """Host memory that a node needs: offloaded state, and for CPU plans the memory of all processes."""
    on_cpu = plan.cluster.gpu.device == "cpu"
    return plan.predicted.host_ram_gib_per_node + plan.predicted.peak_gib * processes_per_node(plan) * on_cpu


def swap_directory(plan: Plan, run: RunSpec, run_directory: Path) -> Path | None:
    """The run's own folder for swap files, below ``run.nvme_path``.

    Two runs must not share one: DeepSpeed names files only by rank and parameter, and overwrites existing files. None
    if the layout needs no path, or if the run has none (``check_nvme`` reports that).
    """
    if not plan.layout.uses_nvme or run.nvme_path is None:
        return None
    return Path(run.nvme_path) / f"kit-{hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:12]}"


def check_optimizer(plan: Plan) -> CheckResult | None:
    """Checks the versions of Python and packages that the plan's optimizer needs on its engine."""
    name, engine = plan.job.optimizer.name, plan.layout.engine
    traits = OPTIMIZERS[name]
    oldest = traits.oldest.get(engine, {})
    found = {each: platform.python_version() if each == "Python" else installed_version(each) for each in oldest}
    if all(here and numbers(here) >= numbers(oldest[each]) for each, here in found.items()):
        return None
    said = ", ".join(f"{each} {version} or newer ({found[each] or 'none'} here)" for each, version in oldest.items())
    packages = " ".join(f"'{each}>={version}'" for each, version in oldest.items() if each != "Python")
    others = ", ".join(each for each in traits.implementations if each != engine)
    return failure(
        "packages",
        f"optimizer.name={name} on layout.engine={engine} needs {said}",
        f"in an environment of that Python: pip install {packages}; or use layout.engine={others}",
    )


def check_gpus(plan: Plan, found: Sequence[tuple[str, float]] | None) -> CheckResult | None:
    """Checks this node's GPUs. ``found``: (driver's name, GiB) of each GPU; None if unknown. CPU plans pass.

    Fails if fewer GPUs than the node's processes have the planned model and memory size. For a GPU that the user
    described, only the memory size is compared.
    """
    gpu, needed = plan.cluster.gpu, processes_per_node(plan)
    if gpu.device != "cuda" or found is None:
        return None
    named = gpu.name in gpu_names()
    fitting = [name for name, gib in found if gib >= MEMORY_SLACK * gpu.memory_gib and (is_gpu(gpu, name) or not named)]
    if len(fitting) >= needed:
        return None
    kinds = Counter((name, f"{gib:.0f}") for name, gib in found)
    here = ", ".join(f"{count} x {name} ({gib} GiB)" for (name, gib), count in sorted(kinds.items())) or "no GPU"
    cluster = "local" if plan.cluster.num_nodes == 1 else "COUNTxGPU"
    planned = f"{needed} x {gpu.name} ({gpu.memory_gib:.0f} GiB) a node"
    return failure(
        "gpus",
        f"the plan is for {planned} and {os.uname().nodename} has {here}",
        f"plan for what is here: kit emit RECIPE cluster={cluster} --out NEW_DIRECTORY",
    )


def gpus_here(environment: Mapping[str, str] = os.environ) -> list[tuple[str, float]] | None:
    """(name, GiB) of the GPUs that nvidia-smi lists, restricted to the indices in CUDA_VISIBLE_DEVICES; None without
    nvidia-smi."""
    listed = nvidia_gpus()
    indices = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if listed is None or not all(index.strip().isdecimal() for index in indices):
        return listed
    return [listed[int(index)] for index in indices if int(index) < len(listed)]


def check_nvme(plan: Plan, run: RunSpec, run_directory: Path) -> CheckResult | None:
    """Checks that the NVMe path is set, exists, is writable, supports direct I/O and has space for the swap files."""
    if not plan.layout.uses_nvme:
        return None
    folder = swap_directory(plan, run, run_directory)
    if folder is None:
        fix = "give a directory on the node's own disk, for example run.nvme_path=/mnt/nvme"
        return failure("nvme", "run.nvme_path is missing, and the layout offloads to nvme", fix)
    path, host, key = folder.parent, os.uname().nodename, f"run.nvme_path={folder.parent}"
    if not path.is_dir():
        return failure("nvme", f"{key}: no such directory on {host}", "mount the disk there")
    try:
        free = to_gib(free_bytes(path, direct=True))
    except ValueError as error:
        return failure("nvme", f"{key}: its file system refuses direct I/O ({error})", "give a directory on a disk")
    except OSError as error:
        return failure("nvme", f"{key}: not writable on {host} ({error.strerror})", "give a directory that is")
    needed = plan.predicted.nvme_gib_per_node
    # Swap files of an earlier attempt of this run are overwritten, so their space is free.
    free += to_gib(sum(file.stat().st_size for file in folder.rglob("*.swp"))) if folder.is_dir() else 0.0
    if free < needed:
        said = f"{key}: {free:.2f} GiB free on {host} and the swap files take {needed:.2f}"
        return failure("nvme", said, "make room, or give another disk")
    return None


def check_libaio(plan: Plan) -> CheckResult | None:
    """Checks for libaio, which DeepSpeed's NVMe offload needs, before any process imports DeepSpeed."""
    missing = plan.layout.uses_nvme and find_library("aio") is None
    return failure("libaio", NO_LIBAIO, INSTALL_LIBAIO) if missing else None


def check_host_memory(plan: Plan) -> CheckResult | None:
    """Checks that the predicted host memory is free, before anything is loaded."""
    needed, available = host_gib(plan), host_memory().get("MemAvailable")
    if not plan.predicted.host_ram_gib_per_node or available is None or to_gib(available) >= needed:
        return None
    said = (
        f"offload needs {needed:.1f} GiB of host memory a node, and {os.uname().nodename} has {to_gib(available):.1f}"
    )
    return failure("host-memory", f"{said} available", "end other programs, use more nodes, or offload to nvme")

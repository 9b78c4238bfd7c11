"""What a plan and its run require of a machine, and checks whether this machine has it."""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

import kit.emit.megatron
from kit.cost.hardware import runs_rocm
from kit.cost.reliability import checkpoint_bytes
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from kit.object_storage import is_address
from kit.planner.plan import Plan
from kit.preflight.check_result import CheckResult, failure
from kit.preflight.facts import free_bytes
from kit.preflight.versions import installed_version, numbers
from kit.specs.catalog import gpu_names
from kit.specs.local import host_memory, is_gpu, nvidia_gpus
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.run import RunSpec, data_paths, run_paths
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


@dataclass(frozen=True)
class Requirements:
    """Requirements of a plan. Sizes are for one node unless the name says otherwise."""

    packages: tuple[str, ...]
    """Distributions that must be installed."""
    cuda: bool
    """Whether the plan is for NVIDIA's GPUs; kit asks nvidia-smi alone."""
    gpus_per_node: int
    gpu_gib: float
    """Predicted peak of one GPU."""
    host_gib: float
    """Host memory of one node, by the function of the same name."""
    cpu_adam: bool
    """DeepSpeed compiles its CPU Adam on first use."""
    nvme_gib: float
    num_nodes: int
    paths: tuple[str, ...]
    """Files that must be the same on all nodes."""
    checkpoint_directory: str
    checkpoints_gib: float
    """Disk space for the kept checkpoints, and one more during a save."""
    nvme_path: str | None


def requirements_of(rundir: RunDirectory) -> Requirements:
    """Requirements of a run directory's plan and run."""
    plan, run = rundir.plan, rundir.run
    cluster, predicted = plan.cluster, plan.predicted
    on_gpus = cluster.gpu.device == "cuda"
    packages = list(PACKAGES[plan.layout.engine])
    if kit.emit.megatron.applies(plan):
        packages.append("megatron-core")
    one = to_gib(checkpoint_bytes(plan.workload))
    prefixes = data_paths(run.data).values()
    if any(prefix.startswith("s3://") for prefix in prefixes):
        packages.append("s3fs")
    data = [f"{prefix}{end}" for prefix in prefixes if not is_address(prefix) for end in (".bin", ".idx")]
    model = [str(Path(path) / "config.json") for key, path in run_paths(run).items() if key == "model_path"]
    offloads = "cpu" in (plan.layout.offload_optimizer, plan.layout.offload_param) or plan.layout.uses_nvme
    return Requirements(
        packages=tuple(packages),
        cuda=on_gpus and not runs_rocm(plan.cluster.gpu),
        gpus_per_node=processes_per_node(plan),
        gpu_gib=predicted.peak_gib if on_gpus else 0.0,
        host_gib=host_gib(plan),
        cpu_adam=offloads and plan.layout.engine == "deepspeed",
        nvme_gib=predicted.nvme_gib_per_node,
        num_nodes=cluster.num_nodes,
        paths=(str(rundir.path / "plan.yaml"), str(rundir.path / "run.yaml"), *data, *model),
        checkpoint_directory=str(rundir.path),
        checkpoints_gib=one * (run.checkpoint.keep_last + 1),
        nvme_path=run.nvme_path,
    )


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

"""What a plan and its run need of a machine, as ``host_checks`` compares it with the facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kit.emit.megatron
from kit.cost.hardware import runs_rocm
from kit.cost.reliability import checkpoint_bytes
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from kit.object_storage import is_address
from kit.preflight.requirements import PACKAGES, host_gib
from kit.specs.run import data_paths, run_paths
from kit.units import to_gib


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
    one = to_gib(checkpoint_bytes(plan.workload))
    prefixes = data_paths(run.data).values()
    packages = (
        *PACKAGES[plan.layout.engine],
        *["megatron-core"] * kit.emit.megatron.applies(plan),
        *["s3fs"] * any(prefix.startswith("s3://") for prefix in prefixes),
    )
    data = [f"{prefix}{end}" for prefix in prefixes if not is_address(prefix) for end in (".bin", ".idx")]
    model = [str(Path(path) / "config.json") for key, path in run_paths(run).items() if key == "model_path"]
    offloads = "cpu" in (plan.layout.offload_optimizer, plan.layout.offload_param) or plan.layout.uses_nvme
    return Requirements(
        packages=packages,
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

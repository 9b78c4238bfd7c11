"""What one run asks of every machine: from its run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kit.emit.megatron
from kit.cost.operation import checkpoint_bytes
from kit.emit.run_directory import RunDirectory
from kit.preflight.offload import uses_nvme
from kit.preflight.run_checks import PACKAGES
from kit.units import to_gib

DISTRIBUTIONS = {"torch": "torch", "transformers": "transformers", "deepspeed": "deepspeed", "accelerate": "accelerate"}


@dataclass(frozen=True)
class Needs:
    """Of one node, where it says nothing else."""

    packages: tuple[str, ...]
    """Distributions that must be installed."""
    cuda: bool
    gpu_name: str
    gpus_per_node: int
    gpu_gib: float
    """Predicted peak of one GPU."""
    host_gib: float
    """Host memory that offload takes, and all processes' memory where the plan is for CPUs."""
    cpu_adam: bool
    """DeepSpeed compiles its CPU Adam on first use."""
    nvme_gib: float
    num_nodes: int
    paths: tuple[str, ...]
    """Files that must be the same on all nodes."""
    checkpoint_directory: str
    checkpoints_gib: float
    """Of as many checkpoints as are kept, one being written, and the exchange checkpoint at the end."""
    nvme_path: str | None
    downloads: bool
    """Whether anything has to come from the hub: nothing of kit's, so a token is not needed."""


def needs_of(rundir: RunDirectory) -> Needs:
    """What the plan and its run ask."""
    plan, run = rundir.plan, rundir.run
    cluster, predicted = plan.cluster, plan.predicted
    on_gpus = cluster.gpu.device == "cuda"
    processes = plan.layout.world_size // cluster.num_nodes
    packages = [DISTRIBUTIONS[name] for name in PACKAGES[plan.layout.engine]]
    if kit.emit.megatron.applies(plan):
        packages.append("megatron-core")
    one = to_gib(checkpoint_bytes(plan.workload))
    data = [f"{prefix}{end}" for prefix in (run.data.train, run.data.validation) if prefix for end in (".bin", ".idx")]
    model = [] if run.model_path is None else [str(Path(run.model_path) / "config.json")]
    offloads = "cpu" in (plan.layout.offload_optimizer, plan.layout.offload_param) or uses_nvme(plan)
    return Needs(
        packages=tuple(packages),
        cuda=on_gpus,
        gpu_name=cluster.gpu.name,
        gpus_per_node=processes,
        gpu_gib=predicted.peak_gib if on_gpus else 0.0,
        host_gib=predicted.host_ram_gib_per_node + (0.0 if on_gpus else predicted.peak_gib * processes),
        cpu_adam=offloads,
        nvme_gib=predicted.nvme_gib_per_node,
        num_nodes=cluster.num_nodes,
        paths=(str(rundir.path / "plan.yaml"), str(rundir.path / "run.yaml"), *data, *model),
        checkpoint_directory=str(rundir.path),
        checkpoints_gib=one * (run.checkpoint.keep_last + 2),
        nvme_path=run.nvme_path,
        downloads=False,
    )

"""Whether the GPUs of this machine are those that a plan was made for. Imports no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from kit.emit.launch import processes_per_node
from kit.errors import EngineError
from kit.planner.plan import Plan
from kit.specs.catalog import gpu_names
from kit.specs.local import is_gpu, nvidia_gpus

MEMORY_SLACK = 0.97
"""Of the planned memory: drivers differ in what they keep for themselves."""


def check_gpus(plan: Plan, found: Sequence[tuple[str, float]]) -> None:
    """``found``: (name as the driver has it, GiB) of each GPU of this node. Nothing is asked of a plan for CPUs.

    Raises EngineError where fewer GPUs than the node's processes are of the planned kind and size: another GPU fits
    another layout, and its speed another. A GPU that the user described is known by its memory alone.
    """
    gpu, needed = plan.cluster.gpu, processes_per_node(plan)
    if gpu.device != "cuda":
        return
    named = gpu.name in gpu_names()
    fitting = [name for name, gib in found if gib >= MEMORY_SLACK * gpu.memory_gib and (is_gpu(gpu, name) or not named)]
    if len(fitting) >= needed:
        return
    kinds = Counter((name, f"{gib:.0f}") for name, gib in found)
    here = ", ".join(f"{count} x {name} ({gib} GiB)" for (name, gib), count in sorted(kinds.items())) or "no GPU"
    cluster = "local" if plan.cluster.num_nodes == 1 else "COUNTxGPU"
    raise EngineError(
        f"the plan is for {needed} x {gpu.name} ({gpu.memory_gib:.0f} GiB) a node and {os.uname().nodename} has "
        f"{here}; plan for what is here: kit emit RECIPE cluster={cluster} --out NEW_DIRECTORY"
    )


def gpus_here(environment: Mapping[str, str] = os.environ) -> list[tuple[str, float]] | None:
    """GPUs that nvidia-smi lists, only those of CUDA_VISIBLE_DEVICES where it numbers them; None without nvidia-smi."""
    listed = nvidia_gpus()
    words = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if listed is None or not all(word.strip().isdecimal() for word in words):
        return listed
    return [listed[int(word)] for word in words if int(word) < len(listed)]

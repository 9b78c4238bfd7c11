"""Compares an out-of-memory with the plan's predicted memory."""

from __future__ import annotations

import re

from kit.planner.plan import Plan
from kit.preflight.requirements import host_gib

_HELD = re.compile(r"this process has ([\d.]+) GiB memory in use|([\d.]+) GiB (?:is )?(?:already )?allocated")
"""CUDACachingAllocator's message: in torch 2.1 and later, or in earlier versions."""


def beside_plan(cause: str, evidence: str, plan: Plan) -> str:
    """Text to add to an out-of-memory cause: the predicted peak, its largest parts, and the prediction's error."""
    if cause == "gpu-out-of-memory":
        stage = max(plan.predicted.memory, key=lambda stage: stage.peak_gib)
        largest = sorted(stage.components_gib.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
        said = f"the plan predicted a peak of {stage.peak_gib:.1f} of {plan.cluster.gpu.memory_gib:.1f} GiB ({parts})"
        held = _HELD.search(evidence)
        if held:
            measured = float(next(group for group in held.groups() if group))
            said += f", the process held {measured:.1f}, {measured / stage.peak_gib:.2f} times that"
        return said
    has = "unknown" if plan.cluster.host_ram_gib is None else f"{plan.cluster.host_ram_gib:.1f} GiB"
    return f"the plan predicted {host_gib(plan):.1f} GiB of host memory a node, of {has}"

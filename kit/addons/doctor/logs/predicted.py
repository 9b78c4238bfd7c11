"""Compares an out-of-memory with the plan's predicted memory."""

from __future__ import annotations

import re
from dataclasses import replace

from kit.addons.doctor.logs.cause import Cause
from kit.planner.plan import Plan
from kit.preflight.requirements import host_gib

_HELD = re.compile(r"this process has ([\d.]+) GiB memory in use|([\d.]+) GiB (?:is )?(?:already )?allocated")
"""CUDACachingAllocator's message: in torch 2.1 and later, or in earlier versions."""


def beside_plan(cause: Cause, plan: Plan) -> Cause:
    """An out-of-memory with the predicted peak, its largest parts, and the prediction's error; others as they are."""
    if not cause.cause.endswith("out-of-memory"):
        return cause
    said = _of_gpu(cause.evidence, plan) if cause.cause == "gpu-out-of-memory" else _of_host(plan)
    return replace(cause, meaning=f"{cause.meaning}; the plan predicted {said}")


def _of_gpu(evidence: str, plan: Plan) -> str:
    stage = max(plan.predicted.memory, key=lambda stage: stage.peak_gib)
    largest = sorted(stage.components_gib.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
    said = f"a peak of {stage.peak_gib:.1f} of {plan.cluster.gpu.memory_gib:.1f} GiB ({parts})"
    if held := _HELD.search(evidence):
        measured = float(held[1] or held[2])
        said += f", the process held {measured:.1f}, {measured / stage.peak_gib:.2f} times that"
    return said


def _of_host(plan: Plan) -> str:
    has = "unknown" if plan.cluster.host_ram_gib is None else f"{plan.cluster.host_ram_gib:.1f} GiB"
    return f"{host_gib(plan):.1f} GiB of host memory a node, of {has}"

"""What fp8 by torchao is predicted to gain, and that processors emulate it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kit.cost.step_time import step_time_components_s
from kit.cost.workload import Workload
from kit.planner.plan import Decision
from kit.planner.rules import is_legal
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import human_seconds


def fp8_remarks(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Iterator[Decision]:
    """One remark where linear layers are converted (kit/engines/kernels/fp8.py), with the same layout in bf16."""
    if job.precision != "fp8" or layout.engine != "torch":
        return
    if cluster.gpu.device == "cpu":
        yield Decision(
            rule="precision",
            chosen="fp8",
            why="emulated, for a CPU has no fp8: operands of linear layers are rounded to 8 bits and multiplied in "
            "fp32; it shows fp8's rounding, and nothing of its speed and memory",
        )
        return
    plain = dataclasses.replace(job, precision="bf16")
    if is_legal(Workload(model=model, cluster=cluster, job=plain, layout=layout)):
        step_s = sum(step_time_components_s(model, cluster, plain, layout).values())
        yield Decision(
            rule="precision",
            chosen="fp8",
            why="linear layers of the blocks multiply in 8 bits, by scales of whole tensors; head, attention, experts, "
            "gathered weights and all that is kept stay as in bf16",
            rejected=(f"bf16, the same layout: {human_seconds(step_s)} a step",),
        )

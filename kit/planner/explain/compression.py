"""What compressed exchanges would gain, where they are lossy and so never chosen unasked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kit.cost.efficiency import usable_gib
from kit.cost.memory import peak_gib
from kit.cost.step_time import step_time_components_s
from kit.cost.workload import Workload
from kit.planner.plan import Decision
from kit.planner.rules import is_legal
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import human_seconds

WORTH_SAYING = 0.05
"""Part of a step that has to be gained."""


def compression_remarks(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> Iterator[Decision]:
    """One remark, with every kind that would gain something on these links."""
    w = Workload(model=model, cluster=cluster, job=job, layout=layout)
    now = _step_s(model, cluster, job, layout)
    gains = []
    for name, other in _alternatives(layout):
        if is_legal(w.with_layout(other)) and peak_gib(model, cluster, job, other) <= usable_gib(cluster.gpu):
            then = _step_s(model, cluster, job, other)
            if then <= (1 - WORTH_SAYING) * now:
                gains.append(f"{name}: {human_seconds(then)} a step, {1 - then / now:.0%} less")
    if gains:
        yield Decision(
            rule="gradient_compression",
            chosen="none",
            why="what is sent would be rounded, so only on request; on these links it would gain",
            rejected=tuple(gains),
        )


def _alternatives(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if layout.gradient_compression == "none":
        yield "gradient_compression=bf16", dataclasses.replace(layout, gradient_compression="bf16")
        yield "gradient_compression=powersgd", dataclasses.replace(layout, gradient_compression="powersgd")
    if not (layout.zero_quantized_weights or layout.zero_quantized_gradients):
        weights = dataclasses.replace(layout, zero_quantized_weights=True)
        yield "zero_quantized_weights", weights
        yield (
            "zero_quantized_weights and zero_quantized_gradients",
            dataclasses.replace(weights, zero_quantized_gradients=True),
        )


def _step_s(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> float:
    return sum(step_time_components_s(model, cluster, job, layout).values())

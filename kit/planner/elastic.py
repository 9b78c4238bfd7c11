"""A plan on fewer of its nodes, with the same global batch: what elastic launch may fall back to.

Tensor, pipeline and context parallelism, ZeRO stage and micro batch stay. Data parallelism shrinks with the nodes, and
accumulation grows, so that a step has the same samples.
"""

from __future__ import annotations

from dataclasses import replace

from kit.cost.estimate import predict
from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import peak_gib
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner.plan import Plan
from kit.planner.rules import violations
from kit.specs.validation import changed


def on_nodes(plan: Plan, num_nodes: int) -> Plan:
    """The plan on ``num_nodes`` of its nodes. Raises ``PlanError``, which names the rule that such a layout breaks."""
    if num_nodes == plan.cluster.num_nodes:
        return plan
    workload = _workload(plan, num_nodes)
    if isinstance(workload, str):
        choices = " or ".join(map(str, legal_nodes(plan)))
        raise PlanError(
            f"{num_nodes} of {plan.cluster.num_nodes} nodes: {workload}; use {choices}, or another "
            "job.global_batch_size"
        )
    return replace(plan, cluster=workload.cluster, layout=workload.layout, predicted=predict(workload))


def legal_nodes(plan: Plan) -> tuple[int, ...]:
    """Numbers of nodes, ascending up to the plan's, on which the plan keeps its global batch, is legal and fits."""
    fewer = (nodes for nodes in range(1, plan.cluster.num_nodes) if not isinstance(_workload(plan, nodes), str))
    return (*fewer, plan.cluster.num_nodes)


def _workload(plan: Plan, num_nodes: int) -> Workload | str:
    """The workload on ``num_nodes`` nodes, or why there is none."""
    layout, most = plan.layout, plan.cluster.num_nodes
    if not 1 <= num_nodes <= most:
        return f"must be from 1 to {most}"
    world = layout.world_size // most * num_nodes
    replica = layout.world_size // layout.dp
    dp, rest = divmod(world, replica)
    if rest:
        return f"{world} GPUs are no multiple of the {replica} that share one replica"
    accumulation, rest = divmod(layout.global_batch_size, layout.micro_batch_size * dp)
    if rest:
        size, each = layout.global_batch_size, layout.micro_batch_size
        return f"global_batch_size={size} is no multiple of micro_batch_size={each} · dp={dp}"
    workload = Workload(
        model=plan.model,
        cluster=changed(plan.cluster, num_nodes=num_nodes),
        job=plan.job,
        layout=replace(layout, dp=dp, gradient_accumulation_steps=accumulation),
    )
    if broken := violations(workload):
        return str(broken[0])
    peak, usable = peak_gib(workload), usable_gib(plan.cluster.gpu)
    return f"{peak:.1f} GiB per GPU, {usable:.1f} usable" if peak > usable else workload

"""A run on fewer nodes than planned: the plan on the nodes that torchrun found, from the same run directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kit.emit import deepspeed, megatron
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from kit.errors import EngineError
from kit.planner.elastic import on_nodes
from kit.planner.plan import Plan
from kit.planner.schedule import length


def on_started(rundir: RunDirectory, processes: int, min_nodes: int) -> RunDirectory:
    """The run on the nodes of so many processes, at least ``min_nodes``: data parallelism and accumulation are planned
    again, and everything else stays, edits by hand too.

    Raises PlanError if the plan has no layout on ``min_nodes`` or on these nodes; SpecError if the batch ramp does not
    fit there; EngineError if there are too few, or a node with another number of processes."""
    plan = rundir.plan
    on_nodes(plan, min_nodes)
    found, rest = divmod(processes, processes_per_node(plan))
    if rest or not min_nodes <= found:
        raise EngineError(
            f"{processes} processes were started and the run needs {min_nodes} to {plan.cluster.num_nodes} nodes of "
            f"{processes_per_node(plan)}; start them with launch_elastic.sh"
        )
    now = on_nodes(plan, found)
    if now == plan:
        return rundir
    length(now, rundir.run)  # raises if a size of the batch ramp does not fit
    settings = {"deepspeed": deepspeed.ds_config, "megatron": megatron.megatron_settings}.get(plan.layout.engine)
    return dataclasses.replace(
        rundir,
        plan=now,
        settings=_replanned(rundir.settings, settings, plan, now) if settings else rundir.settings,
        megatron=_replanned(rundir.megatron, megatron.megatron_settings, plan, now) if rundir.megatron else {},
    )


def _replanned(
    settings: Mapping[str, Any], derive: Callable[[Plan], Mapping[str, Any]], plan: Plan, now: Plan
) -> dict[str, Any]:
    """The settings with those that differ between the plans."""
    before, after = derive(plan), derive(now)
    return {**settings, **{key: value for key, value in after.items() if value != before.get(key)}}

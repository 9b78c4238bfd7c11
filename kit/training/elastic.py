"""A run on fewer nodes than planned: the plan on the nodes that torchrun found, from the same run directory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.emit import deepspeed, megatron
from kit.emit.launch import processes_per_node
from kit.emit.run_directory import RunDirectory
from kit.errors import EngineError
from kit.planner.elastic import legal_nodes, on_nodes
from kit.planner.plan import Plan
from kit.planner.schedule import check_ramp
from kit.training.run_lock import NAME as LOCK
from kit.training.run_lock import STALE_S
from kit.training.stopping import STOPPED_CODE

_LOST_S = 5 * STALE_S
"""A node that waits gives up after so long without a heartbeat of the run: the imports of a large one take minutes."""


def on_started(rundir: RunDirectory, processes: int, min_nodes: int) -> RunDirectory:
    """The run on the nodes of so many processes, at least ``min_nodes``, or on the most of them that are legal. Data
    parallelism and accumulation are planned again, and everything else stays, edits by hand too.

    Raises PlanError if the plan has no layout on ``min_nodes``; SpecError if the batch ramp does not fit on these
    nodes; EngineError if there are too few or too many, or a node with another number of processes."""
    plan = rundir.plan
    on_nodes(plan, min_nodes)
    found, rest = divmod(processes, processes_per_node(plan))
    if rest or not min_nodes <= found <= plan.cluster.num_nodes:
        raise EngineError(
            f"{processes} processes were started and the run needs {min_nodes} to {plan.cluster.num_nodes} nodes of "
            f"{processes_per_node(plan)}; start them with launch_elastic.sh"
        )
    now = on_nodes(plan, max(nodes for nodes in legal_nodes(plan) if nodes <= found))
    if now == plan:
        return rundir
    check_ramp(now, rundir.run)
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


def wait_as_spare(directory: Path, look_s: float = 1.0, lost_s: float = _LOST_S) -> int:
    """Wait, on a node that the layout cannot use, until the run has ended: torchrun stops and starts this process when
    a node is lost or comes. Returns the exit code: 0, or ``STOPPED_CODE`` if the run has no heartbeat any more."""
    before, beaten, since = _summary(directory), 0, time.monotonic()
    while time.monotonic() - since < lost_s:
        time.sleep(look_s)
        now = _summary(directory)
        if now and now != before and now[1] is None:
            return 0
        with suppress(OSError):
            if (heartbeat := (directory / LOCK).stat().st_mtime_ns) != beaten:
                beaten, since = heartbeat, time.monotonic()
    return STOPPED_CODE


def _summary(directory: Path) -> tuple[int, str | None] | None:
    """(time of writing, why the run stopped) of the run's summary; None without one."""
    path = directory / "summary.json"
    try:
        return path.stat().st_mtime_ns, json.loads(path.read_text(encoding="utf-8"))["stopped"]
    except (OSError, ValueError, LookupError):
        return None

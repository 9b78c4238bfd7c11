"""Model, cluster, job and pins → a plan, or every reason why there is none."""

from __future__ import annotations

import math

from kit.cost.estimate import predict
from kit.cost.memory.deepspeed_sizes import buffer_sizes
from kit.errors import PlanError
from kit.planner.calibration import NONE, Calibration, corrected
from kit.planner.explain.decisions import alternatives, decisions
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import SearchResult, search
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec

NO_TIME = "checkpoints and failures leave no time for training"
"""Why a plan with a step time is of no use: its days are infinite."""


def make_plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    pins: Pins | None = None,
    calibration: Calibration = NONE,
    tight: bool = False,
) -> Plan:
    """The fastest layout that fits, with its predictions and the reasons for every choice.

    ``calibration``: ratios of measured to predicted values of earlier runs, which correct the predictions. ``tight``:
    whether the layout may fill the GPU without room for the error of its predicted peak.

    Raises ``PlanError``. If no layout is legal, the message lists every broken rule. If none fits, it names the layout
    that comes closest and the cheapest changes that would make it fit.
    """
    return fastest_plan(
        Request(model=model, cluster=cluster, job=job, pins=pins or Pins(), calibration=calibration, tight=tight)
    )


def fastest_plan(request: Request) -> Plan:
    """``make_plan`` of a request. Raises ``PlanError``."""
    return plan_of(request, search(request))


def plan_that_ends(request: Request) -> Plan:
    """The fastest plan. Raises ``PlanError``, with ``NO_TIME`` too where it would never end."""
    plan = fastest_plan(request)
    if plan.predicted.total_days is not None and not math.isfinite(plan.predicted.total_days):
        raise PlanError(NO_TIME)
    return plan


def plan_of(request: Request, result: SearchResult) -> Plan:
    """The plan of a search's best layout. Raises ``PlanError`` if there is none."""
    if result.best is None:
        from kit.planner.explain.infeasible import nothing_fits  # most plans fit

        raise PlanError(nothing_fits(request, result))
    best, model, cluster, job = result.best.layout, request.model, request.cluster, request.job
    workload = request.workload(best.but(**buffer_sizes(model, cluster, best)))
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        layout=workload.layout,
        predicted=corrected(predict(workload), request.calibration.of(workload)),
        decisions=decisions(request, result),
        alternatives=alternatives(request, result),
    )

"""Model, cluster, job and pins → a plan, or every reason why there is none."""

from __future__ import annotations

from kit.cost.estimate import predict
from kit.errors import PlanError
from kit.planner import calibration
from kit.planner.calibration import Calibration
from kit.planner.explain.decisions import decisions
from kit.planner.explain.infeasible import nothing_fits, nothing_legal
from kit.planner.plan import Plan
from kit.planner.weighing import search
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec


def make_plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    pins: Pins | None = None,
    known: Calibration = calibration.NONE,
) -> Plan:
    """The fastest layout that fits, with its predictions and the reasons for every choice.

    Raises ``PlanError``: with every broken rule where no layout is legal; with the nearest miss and the smallest
    changes that would help where none fits. ``known``: residuals of earlier runs, which correct predictions.
    """
    pins = pins or Pins()
    found = search(model, cluster, job, pins, known)
    if not found.considered:
        raise PlanError(nothing_legal(model, cluster, job, pins))
    if found.best is None:
        raise PlanError(nothing_fits(model, cluster, job, pins, found, known))
    layout = found.best.layout
    price = cluster.price_per_node_hour_usd
    hourly = None if price is None else price * cluster.num_nodes
    residual = known.of(model, cluster, job, layout)
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        layout=layout,
        predicted=calibration.corrected(predict(model, cluster, job, layout), residual, job.total_tokens, hourly),
        decisions=decisions(model, cluster, job, pins, found),
    )

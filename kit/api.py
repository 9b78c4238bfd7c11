"""The public names: what the command line does, for use from Python, and the values that it takes and gives."""

from __future__ import annotations

from pathlib import Path

from kit.errors import KitError
from kit.planner.calibration import load as load_calibration
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.specs.job import JobSpec, OptimizerSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec
from kit.specs.recipe import Recipe, load_recipe
from kit.specs.run import RunSpec


def plan(
    model: str | Path | ModelSpec | Recipe,
    cluster: str | ClusterSpec | None = None,
    job: JobSpec | None = None,
    pins: Pins | None = None,
    calibration: str | Path | None = None,
) -> Plan:
    """The fastest plan that fits.

    ``model``: a catalog name, a Hugging Face directory, a shape, or a whole recipe (then nothing else is given).
    ``cluster``: ``"8xH100"``, ``"aws:p5.48xlarge:4"`` or a description. ``pins`` are choices already made.
    ``calibration``: a file that ``kit plan --calibrate`` wrote; earlier runs on the cluster correct the predictions.

    Raises ``SpecError`` for unknown names and impossible values, ``PlanError`` where nothing is legal or fits.
    """
    known = load_calibration(None if calibration is None else Path(calibration))
    if isinstance(model, Recipe):
        if cluster is not None or job is not None or pins is not None:
            raise TypeError(
                "a recipe names its own cluster, job and layout; change them with load_recipe(path, overrides)"
            )
        return make_plan(model.model, model.cluster, model.job, model.layout, known)
    if cluster is None:
        raise TypeError("plan() needs a cluster, for example '8xH100'")
    model = model if isinstance(model, ModelSpec) else load_model(str(model))
    cluster = cluster if isinstance(cluster, ClusterSpec) else parse_cluster(cluster)
    return make_plan(model, cluster, job or JobSpec(), pins or Pins(), known)


__all__ = [
    "ClusterSpec",
    "GpuSpec",
    "JobSpec",
    "KitError",
    "Layout",
    "ModelSpec",
    "OptimizerSpec",
    "Pins",
    "Plan",
    "Recipe",
    "RunSpec",
    "load_recipe",
    "plan",
]

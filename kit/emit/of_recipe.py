"""A recipe → its plan, with the keys that it hands to an engine as they are."""

from __future__ import annotations

from kit.emit.extra import with_extra
from kit.planner.calibration import NONE, Calibration
from kit.planner.length import for_run
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.specs.recipe import Recipe


def plan_of_recipe(recipe: Recipe, calibration: Calibration = NONE, tight: bool = False) -> Plan:
    """The plan of all that a recipe says: model, cluster, job, layout, extra, and the length of its run. ``tight``:
    as of ``make_plan``. Raises ``SpecError`` and ``PlanError``."""
    made = make_plan(recipe.model, recipe.cluster, recipe.job, recipe.layout, calibration, tight)
    return for_run(with_extra(made, recipe.extra), recipe.run)

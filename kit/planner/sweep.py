"""Asks the same of several variants of a request, and keeps why one of them has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from kit.errors import PlanError
from kit.planner.make_plan import fastest_plan
from kit.planner.plan import Plan
from kit.planner.request import Request

Found = TypeVar("Found")
NO_TIME = "checkpoints and failures leave no time for training"
"""Why a plan with a step time is of no use: its days are infinite."""


class Variant(NamedTuple):
    """A request under a name."""

    label: str
    request: Request


class Outcome(NamedTuple, Generic[Found]):
    """What was found for a variant; or None, and why."""

    variant: Variant
    found: Found | None
    why_none: str = ""


def plan_that_ends(asked: Request) -> Plan:
    """The fastest plan. Raises ``PlanError``, with ``NO_TIME`` too where it would never end."""
    plan = fastest_plan(asked)
    if plan.predicted.total_days is not None and not math.isfinite(plan.predicted.total_days):
        raise PlanError(NO_TIME)
    return plan


def sweep(variants: Iterable[Variant], ask: Callable[[Request], Found | None]) -> Iterator[Outcome[Found]]:
    """The outcome of each variant, in their order and one at a time: whoever stops reading asks nothing more.

    A ``PlanError`` is a variant's own outcome; other errors end the sweep.
    """
    for variant in variants:
        try:
            outcome = Outcome(variant, ask(variant.request))
        except PlanError as refused:
            outcome = Outcome(variant, None, str(refused))
        yield outcome

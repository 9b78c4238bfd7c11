"""A plan as text for a terminal."""

from __future__ import annotations

from kit.planner.plan import Plan


def render(plan: Plan) -> str:
    return str(plan)

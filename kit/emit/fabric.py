"""What carries collectives between the nodes of a plan, and the variables its processes need: ``fabrics.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.planner.plan import Plan
from kit.specs.catalog.rows import rows


@dataclass(frozen=True)
class Variable:
    """An environment variable with its reason."""

    name: str
    value: str | None
    """Null: ``launch.sh`` finds it at start."""
    why: str
    if_file: bool = False
    """Set only where the file that it names exists."""


@dataclass(frozen=True)
class Fabric:
    """A row of ``fabrics.yaml``."""

    name: str
    title: str
    nodes: tuple[str, ...]
    profile: str | None
    """A script of the host's own, read where it exists."""
    variables: tuple[Variable, ...]
    notes: str
    source: str


def fabrics() -> tuple[Fabric, ...]:
    """All of them, in file order."""
    return tuple(_fabric(name, row) for name, row in rows("fabrics").items())


def fabric_of(plan: Plan) -> Fabric | None:
    """By the plan's kind of node; None where the catalog does not say: an integrator's or a user's own cluster."""
    name = "cpu-host" if plan.cluster.gpu.device == "cpu" else plan.cluster.name
    return next((fabric for fabric in fabrics() if name in fabric.nodes), None)


def _fabric(name: str, row: dict[str, Any]) -> Fabric:
    variables = tuple(Variable(name=key, **value) for key, value in row["variables"].items())
    kept = {key: " ".join(row[key].split()) for key in ("title", "notes", "source")}
    return Fabric(name=name, nodes=tuple(row["nodes"]), profile=row["profile"], variables=variables, **kept)

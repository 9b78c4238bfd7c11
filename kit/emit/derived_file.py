"""A file that follows from a plan alone. Each target is a module that lists its own in ``FILES``; ``run_directory``
lists the targets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.planner.plan import Plan


def _every_plan(_: Plan) -> bool:
    return True


@dataclass(frozen=True)
class DerivedFile:
    """All that kit knows of one emitted file."""

    name: str
    text: Callable[[Plan], str]
    applies: Callable[[Plan], bool] = _every_plan
    """Whether a plan's run directory has this file."""
    plan_owned_keys: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of the file → dotted key of the recipe that decides it. An edit of one by hand is refused at start;
    any other edit is honoured and recorded."""
    target: str = ""
    """Written only where ``kit emit --target`` names it; empty: always."""
    committed: bool = False
    """Whether ``launch/RECIPE/`` of a checkout shows it (``kit emit --check``)."""


def chosen(*settings: tuple[str, object, Any]) -> dict[str, Any]:
    """Key → value of the settings that are wanted; ``settings``: (key, whether it is wanted, value)."""
    return {key: value for key, wanted, value in settings if wanted}


def json_text(data: Mapping[str, Any]) -> str:
    """JSON as it stands in emitted files."""
    return json.dumps(data, indent=2) + "\n"

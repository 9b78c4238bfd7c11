"""What commands print with ``--json``, as a JSON schema of the types: ``python -m kit.cli.answers``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from kit.cli.app import ADDONS
from kit.cli.conversions import CONVERSIONS
from kit.cli.options import CONFIGS
from kit.entry_points import registered
from kit.planner.plan import Plan
from kit.report.clusters import ClusterAnswer
from kit.report.largest_model import FittingModel
from kit.report.memory_report import MemoryJson
from kit.report.what_if import Explanation
from kit.specs.shipped import ShippedRecipe
from kit.training.completion import Completion


@dataclass(frozen=True)
class Written:
    """What ``kit emit`` wrote."""

    directory: str
    files: list[str]


@dataclass(frozen=True)
class Converted:
    """What ``kit convert`` wrote: the file, prefix or directory, and a sentence about it."""

    path: str
    what: str


ANSWERS: dict[str, Any] = {
    "plan": Plan,
    "plan --clusters": list[ClusterAnswer],
    "explain": Explanation,
    "memory": MemoryJson,
    "memory --largest": list[FittingModel],
    "recipes list": list[ShippedRecipe],
    "emit": Written,
    "convert": Converted,
    "generate": list[Completion],
}
"""Command → the type of its answer, without those of add-ons. ``kit rehearse`` answers with
``kit.rehearsal.rehearse.Rehearsal``, whose module needs the engines."""


def all_answers() -> dict[str, Any]:
    """``ANSWERS`` with those of the add-ons that are installed."""
    entries = [entry for group in (ADDONS, CONVERSIONS, CONFIGS) for entry in registered(group).values()]
    modules = [import_module(entry.module) for entry in entries]
    return ANSWERS | {name: kind for module in modules for name, kind in getattr(module, "ANSWERS", {}).items()}


def json_schema() -> dict[str, Any]:
    """The JSON schema, draft 2020-12; ``commands`` has the schema of each command's answer."""
    adapters = [(name, "serialization", TypeAdapter(kind)) for name, kind in all_answers().items()]
    by_command, rest = TypeAdapter.json_schemas(adapters, title="answers of kit with --json")  # type: ignore[arg-type]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return head | rest | {"commands": {name: schema for (name, _), schema in by_command.items()}}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))

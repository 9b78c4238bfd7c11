"""A file that depends on the plan alone. A module has its files in ``FILES``: ``run_directory`` lists those of every
run directory, and entry points those of ``--target``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.planner.plan import Plan


@dataclass(frozen=True)
class DerivedFile:
    """Describes one emitted file."""

    name: str
    text: Callable[[Plan], str]
    applies: Callable[[Plan], bool] = lambda _: True
    """Whether a plan's run directory has this file."""
    plan_owned_keys: Mapping[str, str] = field(default_factory=dict)
    """Dotted key of the file → dotted key of the recipe that decides it. kit refuses manual edits of these keys at
    start; it honours and records all other edits."""
    target: str = ""
    """Name in ``kit emit --target`` that writes the file; empty: always written."""
    refuses: Callable[[Plan], str] = lambda _: (
        "it has no file for this plan (docs/launch.md says which plans it is for)"
    )
    """Why a plan that does not have the file has none; read where --target asks for it."""
    own_loop: bool = False
    """Whether it starts kit's own training loop, which needs training data and an objective of kit's own."""


def chosen(*settings: tuple[str, object, Any]) -> dict[str, Any]:
    """Key → value of the wanted settings. ``settings``: (key, whether it is wanted, value)."""
    return {key: value for key, wanted, value in settings if wanted}


def json_text(data: Mapping[str, Any]) -> str:
    """JSON text in the format of emitted files."""
    return json.dumps(data, indent=2) + "\n"

"""A file that depends on the plan alone. A module has its files in ``FILES``: ``run_directory`` lists the core's, entry
points those of add-ons, for every run directory and for ``--target``."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.entry_points import load, registered
from kit.errors import KitError
from kit.planner.plan import Plan
from kit.specs.run import RunSpec

ADDED = "kit.run_files"
"""Group of entry points: ``FILES`` of a module, which are in every run directory that they apply to."""


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
    of_run: Callable[[str, RunSpec], str] = lambda text, _: text
    """What the text of an add-on's file is for a run, whose paths are relative to the directory."""
    told: Callable[[Plan], Sequence[str]] = lambda _: ()
    """Paragraphs of README.md about an add-on's file."""


def added_files() -> Iterator[DerivedFile]:
    """The files that installed add-ons have in every run directory. Warns once of one that cannot be imported, whose
    package was removed without pip."""
    for entry in registered(ADDED).values():
        try:
            yield from load(entry)
        except KitError as error:
            _warn(str(error))


@functools.cache
def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def chosen(*settings: tuple[str, object, Any]) -> dict[str, Any]:
    """Key → value of the wanted settings. ``settings``: (key, whether it is wanted, value)."""
    return {key: value for key, wanted, value in settings if wanted}


def json_text(data: Mapping[str, Any]) -> str:
    """JSON text in the format of emitted files."""
    return json.dumps(data, indent=2) + "\n"

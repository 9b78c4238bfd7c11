"""Keys that a program does not have: typos, which it may read over."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from kit.addons.configs.entries import Source
from kit.addons.configs.shell_entries import ENVIRONMENT, LAUNCHER
from kit.addons.configs.tables import Table
from kit.addons.lint.finding import Finding
from kit.addons.lint.known_keys import trainer_arguments


@cache
def recorded(target: str) -> frozenset[str]:
    """Names of a program's settings (``kit/addons/targets/program_fields.json``)."""
    recorded = files("kit.addons.targets").joinpath("program_fields.json")
    return frozenset(json.loads(recorded.read_text(encoding="utf-8"))[target]["fields"].split())


def unknown_keys(table: Table, source: Source) -> Iterator[Finding]:
    """Keys that are neither in the table nor recorded; nothing of a program whose names are in neither."""
    if not table.target and not table.complete:
        return
    known = {*table.keys, *table.inert, "argument"}
    if table.target:
        arguments = trainer_arguments()
        known |= {*recorded(table.target), *arguments.defaults, *arguments.dropped}
    heads = set(table.inert) if source.form == "python" else known
    for key, entry in source.entries.items():
        if key.startswith((ENVIRONMENT, LAUNCHER)) or key.split(".")[0] in heads or {key, key.split(".")[-1]} & known:
            continue
        near = difflib.get_close_matches(key, known, 1, 0.8)
        fix = f"did you mean {near[0]}?" if near else "leave it out, or correct it"
        why = f"{table.program} has no such key in the version that kit knows"
        yield Finding("unknown-key", "warning", source.name, entry.line or None, key, why, fix)

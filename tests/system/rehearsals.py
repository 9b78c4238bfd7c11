"""Rehearse recipes, and write what was shown into ``recipes/evidence.json`` and the table ``recipes/README.md``.

    python -m tests.system.rehearsals                 all of them, one after the other
    python -m tests.system.rehearsals NAME…           these
    python -m tests.system.rehearsals --rotate 2      two, others every day (CI)
    python -m tests.system.rehearsals --table         only the table, from the evidence that is there
    python -m tests.system.rehearsals --plant FAULT NAME…  with a fault
    python -m tests.system.rehearsals --plant-all  every fault on every engine; exit code 0 if all are caught

A whole run also notes how long it took.

Each is ``kit rehearse`` in a process of its own. Exit code 1 where one fails. Evidence belongs to a layout: where a
recipe plans otherwise today, it counts no more.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kit.rehearsal.rehearse import EXPORT_BOUND, LOSS_BOUND, NORM_BOUND, WEIGHT_BOUND
from kit.rehearsal.rounding import ROUNDED_BOUND
from kit.specs.shipped import recipe_names, recipes_directory
from scripts.shipped_files import shipped_plan
from tests.support.program import Names, faults, judged, run
from tests.system.rehearsal_faults import FAULTS, TOGETHER, environment
from tests.system.rehearsal_table import WHOLE, page, summary, whole_run

EVIDENCE = "evidence.json"
PLANTED = ("llama-3.1-8b-sft-fsdp2-8xh100", "llama-3.1-8b-sft-zero2-8xh100", "qwen3-32b-pretrain-16xh100")
"""A recipe of each engine, for planted faults."""
BOUNDS = {
    "loss_difference": LOSS_BOUND,
    "norm_difference": NORM_BOUND,
    "weight_difference": WEIGHT_BOUND,
    "exported_difference": EXPORT_BOUND,
    "in_bf16.rounded_masters": ROUNDED_BOUND,
}
"""Bounds of the figures that show a fault. Figures in bf16 carry their own."""


def main(
    names: Names,
    rotate: Annotated[int, typer.Option(help="so many recipes, chosen by the date")] = 0,
    table: Annotated[bool, typer.Option("--table", help="write the table and run nothing")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="leave the evidence as it is")] = False,
    plant: Annotated[str, typer.Option(help="one fault, in the recipes named")] = "",
    plant_all: Annotated[bool, typer.Option("--plant-all", help="every fault, on one recipe of each engine")] = False,
) -> int:
    """0 where every rehearsal held."""
    if planted := faults(plant, plant_all, FAULTS):
        sets = TOGETHER if plant_all else [planted]
        recipes = names or PLANTED
        return judged(
            [seen for name in recipes for some in sets for seen in caught(some, rehearsed(name, some), name)], plant_all
        )
    directory, begin = recipes_directory(), time.monotonic()
    known: dict[str, Any] = json.loads((directory / EVIDENCE).read_text())
    evidence = {name: record for name, record in known.items() if name in (*recipe_names(), WHOLE)}
    some, passed = [] if table else _chosen(names, rotate), 0
    for name in some:
        evidence[name] = record = rehearsed(name)
        passed += record["passed"]
        said = record.get("error") or summary(record)
        print(f"{'ok    ' if record['passed'] else 'FAILED'} {name}: {said}", flush=True)
        _write(evidence, not no_write)
    if not (names or rotate or table):
        evidence[WHOLE] = _today() | {
            "recipes": len(some),
            "passed": passed,
            "most_processes": max(evidence[name].get("processes", 0) for name in some),
            "minutes": (time.monotonic() - begin) / 60,
            "cores": len(os.sched_getaffinity(0)),
        }
        print(whole_run(evidence[WHOLE]))
    if _write(evidence, not no_write):
        (directory / "README.md").write_text(page(evidence), encoding="utf-8")
    return int(passed < len(some))


def _write(evidence: dict[str, Any], wanted: bool) -> bool:
    if wanted:
        (recipes_directory() / EVIDENCE).write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    return wanted


def _chosen(names: list[str], rotate: int) -> list[str]:
    known = [name for name in recipe_names() if shipped_plan(name) is not None]
    first = datetime.date.today().toordinal() * rotate
    return names or ([known[(first + index) % len(known)] for index in range(rotate)] if rotate else known)


def caught(faults: Sequence[str], record: dict[str, Any], name: str) -> list[bool]:
    """For each fault and each run that it was planted in: whether the right figure turned red."""
    found = []
    for fault in faults:
        for place, figure in FAULTS[fault].shows.items():
            value, bound = _figure(record, figure)
            found.append(not record["passed"] and value is not None and value > bound)
            seen = "is not there" if value is None else f"{value:.0e} (bound {bound:.0e})"
            said = record.get("error") or f"{figure} {seen}"
            print(f"{'caught' if found[-1] else 'MISSED'} {fault} in {name}, {place}: {said}", flush=True)
    return found


def _figure(record: dict[str, Any], figure: str) -> tuple[float | None, float]:
    """(value, bound) of a figure, which has a dot in it where it is of the run in bf16."""
    place, _, key = figure.rpartition(".")
    part = record.get(place) or {} if place else record
    own = part.get("update_bound" if key == "update_difference" else "bound", 0.0)
    return part.get(key), BOUNDS.get(figure, own)


def rehearsed(name: str, faults: Sequence[str] = ()) -> dict[str, Any]:
    """Run one; its result, or why there is none, with date and commit."""
    words, given = [sys.executable, "-m", "kit", "rehearse", name, "--json"], environment(faults) if faults else None
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=given)
    _, begin, rest = done.stdout.partition("{")
    if begin:
        return dict(json.loads(begin + rest)) | _today()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")] or done.stderr.splitlines()
    return {"passed": False, "error": (errors or [f"exit code {done.returncode}"])[-1][:300], **_today()}


def _today() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}


if __name__ == "__main__":
    run(main)

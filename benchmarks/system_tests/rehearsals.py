"""Rehearse recipes, and write what was shown into ``recipes/evidence.json`` and the table ``recipes/README.md``.

    python -m benchmarks.system_tests.rehearsals                 all of them, one after the other
    python -m benchmarks.system_tests.rehearsals NAME…           these
    python -m benchmarks.system_tests.rehearsals --rotate 2      two, others every day (CI)
    python -m benchmarks.system_tests.rehearsals --table         only the table, from the evidence that is there
    python -m benchmarks.system_tests.rehearsals --plant FAULT NAME…  with a fault
    python -m benchmarks.system_tests.rehearsals --plant-all  every fault on every engine; exit code 0 if all are caught

A whole run also notes how long it took.

Each is ``kit rehearse`` in a process of its own. Exit code 1 where one fails. Evidence belongs to a layout: where a
recipe plans otherwise today, it counts no more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.system_tests.rehearsal_faults import FAULTS, TOGETHER, environment
from benchmarks.tables.rehearsal_table import WHOLE, page, summary, whole_run
from kit.emit.generated import shipped_plan
from kit.rehearsal import EXPORT_BOUND, NORM_BOUND, ROUNDED_BOUND, WEIGHT_BOUND
from kit.specs.shipped import recipe_names, recipes_directory

EVIDENCE = "evidence.json"
PLANTED = ("llama-3.1-8b-sft-fsdp2-8xh100", "llama-3.1-8b-sft-zero2-8xh100", "qwen3-32b-pretrain-16xh100")
"""A recipe of each engine, for planted faults."""
BOUNDS = {
    "norm_difference": NORM_BOUND,
    "weight_difference": WEIGHT_BOUND,
    "exported_difference": EXPORT_BOUND,
    "in_bf16.rounded_masters": ROUNDED_BOUND,
}
"""Bounds of the figures that show a fault. Figures in bf16 carry their own."""


def main() -> int:
    """0 where every rehearsal held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rotate", type=int, metavar="N", help="N recipes, chosen by the date")
    parser.add_argument("--table", action="store_true", help="write the table and run nothing")
    parser.add_argument("--no-write", action="store_true", help="leave the evidence as it is")
    parser.add_argument("--plant", choices=sorted(FAULTS), help="one fault, in the recipes named")
    parser.add_argument("--plant-all", action="store_true", help="every fault, on one recipe of each engine")
    arguments = parser.parse_args()
    if arguments.plant or arguments.plant_all:
        return _plant(arguments)
    directory = recipes_directory()
    file = directory / EVIDENCE
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    evidence = {name: record for name, record in known.items() if name in (*recipe_names(), WHOLE)}
    failed, begin = 0, time.monotonic()
    names = [] if arguments.table else _chosen(arguments)
    for name in names:
        record = rehearsed(name)
        failed += not record["passed"]
        said = record.get("error") or summary(record)
        print(f"{'ok    ' if record['passed'] else 'FAILED'} {name}: {said}", flush=True)
        if not arguments.no_write:
            evidence[name] = record
            file.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    if not (arguments.names or arguments.rotate or arguments.table):
        evidence[WHOLE] = _whole(names, evidence, failed, time.monotonic() - begin)
        print(whole_run(evidence[WHOLE]))
    if not arguments.no_write:
        file.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
        (directory / "README.md").write_text(page(evidence), encoding="utf-8")
    return 1 if failed else 0


def _chosen(arguments: argparse.Namespace) -> list[str]:
    names = [name for name in recipe_names() if shipped_plan(name) is not None]
    if arguments.names:
        return list(arguments.names)
    if arguments.rotate:
        first = datetime.date.today().toordinal() * arguments.rotate
        return [names[(first + index) % len(names)] for index in range(arguments.rotate)]
    return names


def _whole(names: list[str], evidence: dict[str, Any], failed: int, seconds: float) -> dict[str, Any]:
    processes = [evidence[name].get("processes", 0) for name in names if name in evidence]
    return {
        "recipes": len(names),
        "passed": len(names) - failed,
        "most_processes": max(processes, default=0),
        "minutes": seconds / 60,
        "cores": len(os.sched_getaffinity(0)),
        **_today(),
    }


def _plant(arguments: argparse.Namespace) -> int:
    """With ``--plant`` 1 where it was caught, as a comparison that turns red; with ``--plant-all`` 0 where all were."""
    sets = TOGETHER if arguments.plant_all else [(arguments.plant,)]
    names = arguments.names or PLANTED
    found = [seen for name in names for faults in sets for seen in caught(faults, rehearsed(name, faults), name)]
    print(f"{len(found)} faults planted, {sum(found)} caught")
    return (0 if all(found) else 1) if arguments.plant_all else int(any(found))


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
    done = subprocess.run(
        [sys.executable, "-m", "kit", "rehearse", name, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(faults) if faults else None,
    )
    begin = done.stdout.find("{")
    record: dict[str, Any] = json.loads(done.stdout[begin:]) if begin >= 0 else {"passed": False}
    if begin < 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error")] or done.stderr.splitlines()
        record["error"] = errors[-1][:300] if errors else f"exit code {done.returncode}"
    return record | _today()


def _today() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}


if __name__ == "__main__":
    raise SystemExit(main())

"""Every number that kit predicts, and every file that it emits, in one JSON; and what changed since another such JSON.

    python -m benchmarks.snapshot --out FILE                     recipes, probe plans, accuracy rows of the tests
    python -m benchmarks.snapshot --out FILE --data DIR          and the accuracy rows of DIR (*.json)
    python -m benchmarks.snapshot --compare BEFORE AFTER         exit code 1 where a number or a file differs

A move of code changes nothing here. A correction changes the numbers that it is about, and its commit says which.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.accuracy.memory import results_of
from benchmarks.accuracy.probe.cases import CASES
from benchmarks.accuracy.rows import load
from benchmarks.accuracy.throughput import result_of
from kit.emit.generated import shipped_plan
from kit.emit.run_directory import files_of
from kit.specs.shipped import recipe_names
from kit.specs.strict_yaml import to_plain
from tests.support.program import run

ROOT = Path(__file__).resolve().parents[1]


def snapshot(data: list[Path]) -> dict[str, Any]:
    """Numbers and texts by a path of names."""
    found: dict[str, Any] = {"recipes": {}, "files": {}, "probe": {}, "accuracy": {}}
    for name in recipe_names():
        plan = shipped_plan(name)
        if plan is None:
            found["recipes"][name] = None
            continue
        found["recipes"][name] = {key: to_plain(getattr(plan, key)) for key in ("layout", "predicted")}
        found["files"][name] = files_of(plan)
    for case in CASES:
        found["probe"][case.name] = to_plain(case.plan().predicted)
    for path in data:
        found["accuracy"][path.stem] = rows = {}
        for row in load(path):
            if "throughput" in path.name:
                result = result_of(row)
                rows[row["id"]] = result.components_s | {"step": result.predicted_s, "left out": result.skipped}
            else:
                rows[row["id"]] = {
                    result.statistic: result.components_gib | {"peak": result.predicted_gib, "left out": result.skipped}
                    for result in results_of(row)
                }
    return found


def differences(before: Any, after: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(path, before, after) of each value that is not equal to 12 digits."""
    kinds = {type(before), type(after)}
    if kinds == {list} and len(before) == len(after):
        before, after = (dict(enumerate(each)) for each in (before, after))
        kinds = {dict}
    if kinds == {dict}:
        keys = dict.fromkeys([*before, *after])
        return [row for key in keys for row in differences(before.get(key), after.get(key), f"{path}/{key}")]
    close = kinds == {float} and math.isclose(before, after, rel_tol=1e-12)
    return [] if close or before == after else [(path, before, after)]


def report(rows: list[tuple[str, Any, Any]], most: int = 40) -> str:
    """A line a difference, numbers with their ratio; the first ``most``, and how many there are by kind."""
    lines = []
    for path, before, after in rows[:most]:
        both = isinstance(before, (int, float)) and isinstance(after, (int, float))
        ratio = f"  ({after / before - 1:+.2%})" if both and before else ""
        lines.append(f"{path}: {str(before)[:60]} -> {str(after)[:60]}{ratio}")
    kinds = Counter("/".join(path.split("/")[:3:2]) for path, _, _ in rows)
    return "\n".join([*lines, f"{len(rows)} differ {dict(kinds) or ''}"])


def main(
    out: Path | None = None,
    data: Annotated[Path | None, typer.Option(help="a folder of published measurements, JSON")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(metavar="BEFORE AFTER")] = None,
) -> int:
    """Write one, or compare two."""
    if compare:
        rows = differences(*(json.loads(path.read_text()) for path in compare))
        print(report(rows))
        return 1 if rows else 0
    accuracy = ROOT / "tests" / "accuracy"
    files = [accuracy / "rows.json", accuracy / "throughput_rows.json", *(sorted(data.glob("*.json")) if data else [])]
    if out is None:
        raise typer.BadParameter("nothing to write to: give --out FILE, or --compare BEFORE AFTER")
    out.write_text(json.dumps(snapshot(files), indent=1, default=repr) + "\n")
    return 0


if __name__ == "__main__":
    run(main)

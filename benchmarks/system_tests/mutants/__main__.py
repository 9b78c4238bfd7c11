"""Plants small realistic bugs one at a time and asks the tests: which are noticed, by which test.

    python -m benchmarks.system_tests.mutants               runs what has no result yet, prints the table
    python -m benchmarks.system_tests.mutants NAME          this one again
    python -m benchmarks.system_tests.mutants --survivors   those that lived again, after tests were added
    … --survivors --together --tests tests/training         those of a package at once, by wider tests; each is then
                                                            planted alone to the test that failed

The rows are ``hand.yaml`` and ``tool.yaml`` here, the results ``benchmarks/results/mutants-*.json``. ``first`` is what
the tests of the day on which a row was written said, ``after`` what later ones say. A test that compares committed
files catches nothing (``runs.NO_CATCH``).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import program
from benchmarks.page import ROOT
from benchmarks.system_tests.mutants.mutant import Mutant, MutantError, mutants
from benchmarks.system_tests.mutants.runs import Run, run

Results = dict[str, dict[str, Any]]


def main(
    names: program.Names,
    survivors: Annotated[bool, typer.Option(help="Only those that no test has noticed.")] = False,
    after: Annotated[bool, typer.Option(help="Tests were added for these rows: leave the first result.")] = False,
    together: Annotated[bool, typer.Option(help="Plant all at once; alone only where a test fails.")] = False,
    tests: Annotated[str, typer.Option(help="Arguments of pytest, instead of the rows' own.")] = "",
    package: Annotated[str, typer.Option(help="Only rows of this one: kit/engines.")] = "",
    origin: Annotated[str, typer.Option(help="Only rows written by hand, or by tool.")] = "",
    table: Annotated[bool, typer.Option(help="Run nothing.")] = False,
) -> int:
    """Run what was asked for; 0 where at least 90 % of all rows, and 85 % of those by hand, are noticed."""
    try:
        every = list(mutants())
        chosen = [
            each
            for each in program.chosen(names, every)
            if not each.equivalent and each.file.startswith(package) and each.origin.startswith(origin)
        ]
        if survivors:
            chosen = [each for each in chosen if _lives(each)]
        elif not names:
            chosen = [each for each in chosen if each.name not in _results(each.origin)]
        if not table:
            _together(chosen, tests, after) if together else _alone(chosen, tests, after)
    except MutantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _table(every)


def _alone(chosen: Sequence[Mutant], tests: str, after: bool) -> None:
    """Raises MutantError after the last one where any could not be run."""
    failures = []
    for mutant in chosen:
        try:
            _record(mutant, run([mutant], tests or mutant.tests), after)
        except MutantError as error:
            print(f"{mutant.name}: NOT RUN: {error}", flush=True)
            failures.append(mutant.name)
    if failures:
        raise MutantError(f"{len(failures)} could not be run, as was said above: {', '.join(failures)}")


def _together(chosen: Sequence[Mutant], tests: str, after: bool) -> None:
    """All in one tree; whoever makes the failing test fail alone is taken out, until the tests pass."""
    left = list(chosen)
    while left:
        all_of_them = run(left, tests)
        print(f"{len(left)} together: {all_of_them.by or 'no test fails'}, {all_of_them.seconds:.0f} s", flush=True)
        if not all_of_them.caught:
            return
        caught = []
        for mutant in left:
            alone = run([mutant], f"'{all_of_them.by}'")
            if alone.caught:
                _record(mutant, alone, after)
                caught.append(mutant)
        if not caught:
            raise MutantError(f"{all_of_them.by} fails with all of them and with none alone; run them alone")
        left = [mutant for mutant in left if mutant not in caught]


def _record(mutant: Mutant, found: Run, after: bool) -> None:
    """Kept at once: a run that is ended goes on where it was."""
    print(f"{mutant.name}: {found.by or 'LIVES'} ({found.seconds:.0f} s)", flush=True)
    results = _results(mutant.origin)
    results.setdefault(mutant.name, {})["after" if after else "first"] = dataclasses.asdict(found)
    text = json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False)
    _path(mutant.origin).write_text(text + "\n", encoding="utf-8")


def _path(origin: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"mutants-{origin}.json"


def _results(origin: str) -> Results:
    path = _path(origin)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _caught(mutant: Mutant, *when: str) -> bool:
    row = _results(mutant.origin).get(mutant.name, {})
    return any(row.get(each, {}).get("caught", False) for each in when)


def _lives(mutant: Mutant) -> bool:
    return mutant.name in _results(mutant.origin) and not _caught(mutant, "first", "after")


def _table(every: Sequence[Mutant]) -> int:
    """Rows by origin and package; equivalent ones are counted apart and in no percentage."""
    print(f"{'by':6}{'package':18}{'run':>5}{'first':>7}{'now':>6}{'equivalent':>12}{'not run':>9}")
    enough = True
    for origin, wanted in (("hand", 0.85), ("tool", 0.0), ("", 0.90)):
        rows = [each for each in every if each.origin.startswith(origin)]
        packages = sorted({each.package for each in rows}) if origin else []
        for package in [*packages, ""]:
            of_it = [each for each in rows if each.package.startswith(package)]
            real = [each for each in of_it if not each.equivalent]
            done = [each for each in real if each.name in _results(each.origin)]
            first = sum(_caught(each, "first") for each in done)
            now = sum(_caught(each, "first", "after") for each in done)
            share = f"   {first / len(done):.0%}, now {now / len(done):.0%}" if done and not package else ""
            print(
                f"{origin or 'all':6}{package or 'all':18}{len(done):5}{first:7}{now:6}"
                f"{len(of_it) - len(real):12}{len(real) - len(done):9}{share}"
            )
        enough &= not done or now >= wanted * len(done)
    for each in every:
        if not each.equivalent and _lives(each):
            print(f"lives: {each.name} ({each.file}): {each.met}")
    return int(not enough)


if __name__ == "__main__":
    program.run(main)

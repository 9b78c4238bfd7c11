"""Plants single bugs that a generator draws, one at a time, and asks the tests: which are noticed, by which test.

    python -m benchmarks.mutants.cover                   first: which tests run which lines (as long as make test twice)
    python -m benchmarks.mutants --seed 7 --count 5      five bugs of each package
    python -m benchmarks.mutants --package kit/cost      of this one alone
    python -m benchmarks.mutants --since main~5          only in lines that changed since then
    python -m benchmarks.mutants --list                  say which, and run nothing

A bug meets the tests of ``make test`` that run its lines, those that run the fewest other lines first. The seed is the
date's number, unless --seed names one; it is printed. A bug that no test notices is read by a person: a test of the
right value kills it, or it changes nothing for anyone. A test that compares committed files catches nothing
(``runs.NO_CATCH``), because whoever writes those files again accepts the bug.
"""

from __future__ import annotations

import datetime
import itertools
import random
import re
import subprocess
from collections import defaultdict
from typing import Annotated

import typer

from benchmarks.mutants.cover import tests_of
from benchmarks.mutants.draw import Mutant, drawn
from benchmarks.mutants.runs import Run, copy_of_the_tree, preload, run
from tests.support import ROOT, program

GOALS = {"kit/training": 0.85, "kit/engines": 0.85}
"""Package → the share that is to be caught; of the others 0.9."""


def main(
    seed: Annotated[int, typer.Option(help="Of the random numbers; the date's number if left out.")] = 0,
    count: Annotated[int, typer.Option(help="Bugs of each package.")] = 5,
    package: Annotated[str, typer.Option(help="Only this one: kit/cost, kit/engines/torch.")] = "kit",
    since: Annotated[str, typer.Option(help="Only in lines that changed since this commit.")] = "",
    tests: Annotated[str, typer.Option(help="Files of tests, instead of those that run the line.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="Say which bugs are drawn, and run nothing.")] = False,
) -> int:
    """0 where the goal is reached in every package."""
    seed = seed or datetime.date.today().toordinal()
    chosen = list(_chosen(seed, count, package, _changed(since) if since else None))
    print(f"seed {seed}: {len(chosen)} bugs")
    if listing:
        print(*chosen, sep="\n")
        return 0
    found: dict[str, list[Run]] = defaultdict(list)
    preload()
    with copy_of_the_tree() as tree:
        for mutant in chosen:
            named = tests.split() or tests_of(mutant.file, mutant.line, mutant.last_line)
            result = run(mutant, named, tree)
            found[mutant.package].append(result)
            print(f"{mutant}: {result.by or 'LIVES'} ({result.tests} tests, {result.seconds:.0f} s)", flush=True)
    for name, runs in sorted(found.items()):
        caught = sum(each.caught for each in runs)
        print(f"{name:16}{caught:4} of {len(runs):3} caught{caught / len(runs):8.0%}")
    return int(any(sum(run.caught for run in runs) < GOALS.get(name, 0.9) * len(runs) for name, runs in found.items()))


def _chosen(seed: int, count: int, package: str, lines: dict[str, set[int]] | None) -> list[Mutant]:
    """``count`` of each package. A draw depends on the seed and the package's own source alone."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / package).rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        if file.count("/") > 1 and (lines is None or file in lines):
            files["/".join(file.split("/")[:2])].append(file)
    return [
        mutant
        for name in sorted(files)
        for mutant in itertools.islice(drawn(files[name], random.Random(f"{seed} {name}"), lines), count)
    ]


def _changed(since: str) -> dict[str, set[int]]:
    """File → its lines of today that ``since`` does not have."""
    command = ["git", "diff", "--unified=0", "--no-prefix", since, "--", "kit"]
    changed: dict[str, set[int]] = defaultdict(set)
    file = ""
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(hunk[1]), int(hunk[2] or 1)
            changed[file].update(range(first, first + number))
    return changed


if __name__ == "__main__":
    program.run(main)

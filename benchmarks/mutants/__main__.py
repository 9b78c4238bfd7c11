"""Plants single bugs that a generator draws, one at a time, and asks the tests: which are noticed, by which test.

    python -m benchmarks.mutants --seed 7 --count 5      five bugs of each package
    python -m benchmarks.mutants --package kit/cost      of this one alone
    python -m benchmarks.mutants --since main~5          only in lines that changed since then
    python -m benchmarks.mutants --list                  say which, and run nothing

A seed that nobody chose is the date's number, unless --seed names one; it is printed. A bug that no test notices is
read by a person: a test of the right value kills it, or it changes nothing for anyone. A test that compares committed
files catches nothing (``runs.NO_CATCH``), because whoever writes those files again accepts the bug.
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

from benchmarks.mutants.draw import Mutant, drawn
from benchmarks.mutants.runs import Run, run
from tests.support import program
from tests.support.page import ROOT

PLANNING = "tests/planning tests/specs tests/emit tests/diagnose benchmarks/tests"
TESTS = {
    "kit/specs": PLANNING,
    "kit/cost": PLANNING,
    "kit/planner": PLANNING,
    "kit/report": f"{PLANNING} tests/test_json.py tests/test_cli.py",
    "kit/emit": f"tests/emit {PLANNING}",
    "kit/preflight": "tests/diagnose/test_preflight.py tests/emit",
    "kit/diagnose": "tests/diagnose",
    "kit/training": "tests/training tests/test_end_to_end.py",
    "kit/engines": "tests/training tests/deepspeed tests/megatron",
    "kit/rehearsal": "tests/test_rehearsals.py tests/planning/test_scaled_down.py",
    "kit/ui": "tests/ui",
    "kit/cli": "tests/test_cli.py tests/test_bad_input.py tests/test_json.py",
}
"""Package → the tests that run its code, the likeliest first."""


def main(
    seed: Annotated[int, typer.Option(help="Of the random numbers; the date's number if left out.")] = 0,
    count: Annotated[int, typer.Option(help="Bugs of each package.")] = 5,
    package: Annotated[str, typer.Option(help="Only this one: kit/cost, kit/engines/torch.")] = "kit",
    since: Annotated[str, typer.Option(help="Only in lines that changed since this commit.")] = "",
    tests: Annotated[str, typer.Option(help="Arguments of pytest, instead of the package's own.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="Say which bugs are drawn, and run nothing.")] = False,
) -> int:
    """0 where at least 85 % of the bugs are noticed."""
    seed = seed or datetime.date.today().toordinal()
    chosen = list(_chosen(seed, count, package, _changed(since) if since else None))
    print(f"seed {seed}: {len(chosen)} bugs")
    if listing:
        print(*chosen, sep="\n")
        return 0
    found: dict[str, list[Run]] = defaultdict(list)
    for mutant in chosen:
        result = run(mutant, tests or TESTS[mutant.package])
        found[mutant.package].append(result)
        print(f"{mutant}: {result.by or 'LIVES'} ({result.seconds:.0f} s)", flush=True)
    for name, runs in [*sorted(found.items()), ("all", list(itertools.chain(*found.values())))]:
        caught = sum(each.caught for each in runs)
        print(f"{name:16}{caught:4} of {len(runs):3} caught{caught / max(1, len(runs)):8.0%}")
    return int(caught < 0.85 * len(runs))


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

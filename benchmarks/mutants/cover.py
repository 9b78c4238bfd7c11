"""Which tests run which lines of kit: ``python -m benchmarks.mutants.cover [ARGUMENTS OF PYTEST]``.

coverage.py measures all processes that tests start. The context of a line is the test that ran it; lines of a fixture
belong to all tests of the file, since it runs for the first of them alone. Without arguments these are the tests of
``make test``; with some, what they run is added to what is known. The answer lies in build/coverage.
"""

from __future__ import annotations

import functools
import os
import re
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage
import pytest

from tests.support import ROOT
from tests.support.workers import measured_for

DATA = ROOT / "build" / "coverage" / "tests"
FAILED = DATA.with_name("failed.txt")
"""Tests that failed without any bug: they would notice everything."""
FEW = 20
CONFIGURATION = f"""[run]
source = {ROOT / "kit"}
data_file = {DATA.with_name("part")}
parallel = true
sigterm = true
core = ctrace
context = ${{PYTEST_CURRENT_TEST-}}
[paths]
kit = {ROOT / "kit"}
"""


def main(arguments: Sequence[str]) -> int:
    """Run the tests and combine what all processes saw. 0 where they passed."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    settings = DATA.with_name("settings.ini")
    settings.write_text(CONFIGURATION, encoding="utf-8")
    FAILED.write_text("")
    chosen = list(arguments) or ["-n", "2", "--dist", "loadgroup", "-m", "not nightly"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, "-p", "no:cacheprovider", *chosen]
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": str(ROOT)}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    measured = coverage.Coverage(data_file=str(DATA), config_file=str(settings))
    if arguments and DATA.exists():
        measured.load()
    parts = [str(part) for part in DATA.parent.glob("part.*")]
    measured.combine(parts, keep=False)
    measured.save()
    return code


def tests_of(file: str, first: int, last: int) -> list[str]:
    """Names of tests that ran one of these lines, those that run the fewest lines of kit first; where they are few,
    then their files, since what is cached runs for the first test alone. Raises FileNotFoundError where nothing was
    measured."""
    contexts = _contexts(file)
    found = {test for line in range(first, last + 1) for test in contexts.get(line, ())}
    failed = {*FAILED.read_text().split("\n"), ""}
    tests = sorted(found - failed, key=lambda test: (_sizes().get(test, 0), test))
    files = [] if len(tests) > FEW else [test.partition("::")[0] for test in tests]
    return list(dict.fromkeys([*tests, *files]))


@functools.cache
def _contexts(file: str) -> dict[int, set[str]]:
    data = coverage.CoverageData(str(_measured()))
    data.read()
    by_line = data.contexts_by_lineno(str(ROOT / file))
    return {line: {_test(context) for context in contexts} for line, contexts in by_line.items()}


@functools.cache
def _sizes() -> dict[str, int]:
    """Test → how many lines of kit it runs, in eights."""
    query = "select context, sum(length(numbits)) from line_bits join context c on c.id = context_id group by c.id"
    sizes: dict[str, int] = defaultdict(int)
    with sqlite3.connect(_measured()) as connection:
        for context, size in connection.execute(query):
            sizes[_test(context)] += size
    return sizes


def _measured() -> Path:
    if not DATA.exists():
        raise FileNotFoundError(f"{DATA}: which tests run a line is not known; run python -m benchmarks.mutants.cover")
    return DATA


def _test(context: str) -> str:
    """``static|dynamic``: the dynamic one, which pytest's own process and pools set, or the test that started the
    process; the name of a case may have a bar of its own. A fixture's lines are the file's."""
    name = re.split(r"\|(?=tests/|benchmarks/|$)", context)[-1].partition("@")[0]
    test, _, phase = name.rpartition(" (")
    if not test:
        return name
    return test if phase == "call)" else test.partition("::")[0]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """In pytest's process."""
    measured_for(f"{item.nodeid} (setup)")
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """In pytest's process."""
    measured_for(f"{item.nodeid} (call)")
    yield
    measured_for("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of all tests, in the process that reports."""
    if report.failed:
        with FAILED.open("a") as file:
            file.write(report.nodeid.partition("@")[0] + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

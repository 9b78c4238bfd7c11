"""A copy of the tree with one bug in it, and pytest there, which stops at the first failure.

Every pytest is a fork of this process, which has imported what is not ours: torch alone takes seconds.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks.mutants.draw import Mutant
from tests.support import ROOT

NO_CATCH = (
    "benchmarks/tests/test_tables.py",
    "benchmarks/tests/test_throughput.py::test_plans_print_the_bands_of_the_accuracy_page",
    "benchmarks/tests/test_throughput.py::test_the_page_of_independent_rows_is_what_the_command_writes",
    "tests/emit/test_recipes.py::test_drift_is_noticed_and_mended",
    "tests/test_generated.py",
    "tests/test_golden.py::test_answers",
    "tests/test_how_to.py",
    "tests/test_proofs.py",
    "tests/test_structure.py",
)
"""Tests that compare committed files, pages or text of the source: whoever writes those again accepts the bug."""
LIMIT_S = 600
"""Of a run that never ends, which is a failure too: somebody would have looked why."""
FIRST_FILES = 3
"""Whose tests run before the others are imported."""
PRELOADED = ("hypothesis", "typer", "rich", "yaml", "numpy", "torch", "transformers", "accelerate", "_pytest.assertion")
_clock = itertools.count(int(time.time()))


class TestsError(Exception):
    """Tests that cannot be run: a name that pytest does not know, a collection that fails without any bug."""


@dataclass(frozen=True)
class Run:
    """What the tests said of one bug."""

    caught: bool
    by: str
    """The first test that failed."""
    seconds: float
    tests: int
    """How many run its lines, or were named."""


class Chosen:
    """A plugin: of what pytest collects, these tests, in this order. A file stands for all of its tests."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts and leaves out."""
        places = {}
        for item in items:
            whole = self._places.get(item.nodeid.partition("::")[0])
            if (place := self._places.get(item.nodeid, whole)) is not None and not item.get_closest_marker("nightly"):
                places[item.nodeid] = place
        items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def preload() -> None:
    """What tests import of other libraries, before forks."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for name in PRELOADED:
        importlib.import_module(name)


def run(mutant: Mutant, tests: Sequence[str], tree: Path) -> Run:
    """Plant ``mutant`` in the copy and run ``tests`` on it, those of a few files first. Raises TestsError."""
    tests = [name for name in tests if not name.startswith(NO_CATCH)]
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    rounds = [part for part in (files[:FIRST_FILES], files[FIRST_FILES:]) if part]
    source = (tree / mutant.file).read_text(encoding="utf-8")
    began, by = time.monotonic(), ""
    try:
        mutant.plant(tree)
        _date(tree / mutant.file)
        for part in rounds:
            if by := _pytest(tree, part, [name for name in tests if name.partition("::")[0] in part]):
                break
    finally:
        (tree / mutant.file).write_text(source, encoding="utf-8")
        _date(tree / mutant.file)
        shutil.rmtree(tree / "build", ignore_errors=True)
    return Run(bool(by), by, round(time.monotonic() - began, 1), len(tests))


def _date(file: Path) -> None:
    """Compiled files are compared by size and second: each version gets a second of its own."""
    second = next(_clock)
    os.utime(file, (second, second))


def _pytest(tree: Path, files: Sequence[str], names: Sequence[str]) -> str:
    """The first test that failed, or why there is none; empty where all passed. Raises TestsError."""
    words = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-n", "0", "-m", "not nightly"]
    with tempfile.TemporaryFile("w+") as output:
        child = get_context("fork").Process(target=_in_child, args=(tree, output.fileno(), [*words, *files], names))
        child.start()
        child.join(LIMIT_S)
        code = child.exitcode
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # all of its session
        child.join()
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if failed:
        return failed[1]
    if code not in (0, 1, 2, 5, None):
        raise TestsError(f"pytest {' '.join(files)} ended with {code}\n{text[-2000:]}")
    return "" if code in (0, 5) else f"no end within {LIMIT_S} s" if code is None else text[-200:]


def _in_child(tree: Path, output: int, words: Sequence[str], names: Sequence[str]) -> None:
    """pytest in the copy, in a session of its own; 70 where it could not be started."""
    status = 70
    with suppress(BaseException):
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("kit", "tests", "benchmarks")]:
            del sys.modules[name]
        status = int(pytest.main([*words], plugins=[Chosen(names)]))
        sys.stdout.flush()
    os._exit(status)


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """Everything that git tracks or would track, as it lies there now, under git like the original."""
    with tempfile.TemporaryDirectory(prefix="kit-mutants-") as directory:
        tree = Path(directory) / "tree"
        _git(ROOT, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree))
        _git(tree, "reset", "--quiet")
        for name in _git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
            if name and (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        if (ROOT / ".venv").exists():
            (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
        yield tree


def _git(where: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout

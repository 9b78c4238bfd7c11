"""A copy of the tree with one bug in it, and pytest there, which stops at the first failure."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.draw import Mutant
from tests.support.page import ROOT

NO_CATCH = (
    "benchmarks/tests/test_throughput.py::test_plans_print_the_bands_of_the_accuracy_page",
    "benchmarks/tests/test_throughput.py::test_the_page_of_independent_rows_is_what_the_command_writes",
    "tests/emit/test_shipped.py::test_committed_files_are_todays",
    "tests/emit/test_shipped.py::test_drift_is_noticed_and_mended",
    "benchmarks/tests/test_tables.py",
    "tests/test_how_to.py",
    "tests/test_proofs.py",
    "tests/test_readme.py",
    "tests/test_structure.py",
)
"""Tests that compare committed files, pages or text of the source: whoever writes those again accepts the bug."""
LIMIT_S = 900
"""Of a run that never ends, which is a failure too: somebody would have looked why."""


class TestsError(Exception):
    """Tests that cannot be run: a name that pytest does not know, a collection that fails without any bug."""


@dataclass(frozen=True)
class Run:
    """One pytest over one planted tree."""

    caught: bool
    by: str
    """The first test that failed."""
    seconds: float


def run(mutant: Mutant, tests: str) -> Run:
    """Plant ``mutant`` in a new copy and run ``tests`` on it. Raises TestsError."""
    with _copy_of_the_tree() as tree:
        mutant.plant(tree)
        began = time.monotonic()
        code, text = _pytest(tree, tests)
        seconds = round(time.monotonic() - began, 1)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if code not in (0, 1, None) and failed is None:
        raise TestsError(f"{mutant}: pytest {tests} ended with {code}\n{text[-2000:]}")
    by = "" if code == 0 else failed[1] if failed else f"no end within {LIMIT_S} s"
    return Run(code != 0, by, seconds)


def _pytest(tree: Path, tests: str) -> tuple[int | None, str]:
    """Its exit code, None where it was ended at the limit, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    command += [word for name in NO_CATCH for word in ("--deselect", name)]
    # Compiled files are compared by size and second: a mutant planted twice in a second would not be seen.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *shlex.split(tests)], cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


@contextmanager
def _copy_of_the_tree() -> Iterator[Path]:
    """Everything that git tracks or would track, as it lies there now, under git like the original."""
    with tempfile.TemporaryDirectory(prefix="kit-mutant-") as directory:
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

"""Tiers of tests by their markers, which tests run beside each other, and how long each takes.

``fast``: no engine, under a second (``make test-fast``). ``nightly``: in ``make test-all`` alone. Everything else, and
what is fast, is ``make test``. Of a test marked ``everyday("id")`` the named cases are in ``make test``, the others
nightly. No date and no folder decides what runs.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import tests.support.uncollected  # noqa: F401
from tests.support import ROOT

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Read when torch is imported. Two processes with a thread for each core wait for each other, at full speed."""

TOGETHER = ("benchmarks/tests", "tests/deepspeed", "tests/megatron", "tests/training", "tests/ui")
"""Places whose tests share something that is costly: a pool of processes (tests/support/workers.py), a run, answers.
Elsewhere the tests of a file are together: they share fixtures and caches."""
FAST = ("tests/addons", "tests/emit", "tests/planning", "tests/specs")
"""Places of which most files need no engine. What takes longer than a second there is marked ``slow``."""
ENGINES = re.compile(
    r"^(?:from|import) (?:torch|transformers|deepspeed|megatron|accelerate|peft|kit\.engines|"
    r"tests\.(?:support\.workers|system\.(?:accepted\.parsers|examples|failures)|training|megatron|deepspeed))\b",
    re.MULTILINE,
)
"""A file that begins with one of these imports takes seconds to collect: none of its tests is fast."""
DURATIONS = ROOT / "tests" / "durations.json"
LIMITS_S = {"fast": 1.0, "test": 20.0}
"""Of one test, on two idle cores."""

settings.register_profile("same every day", derandomize=True, deadline=None)
settings.register_profile("nightly", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"record how long each test took in {DURATIONS}")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # by the number of tests; here it is by time
    settings.load_profile("same every day" if "not nightly" in config.option.markexpr else "nightly")


def tier(item: pytest.Item) -> str:
    """``fast``, ``test`` or ``nightly``."""
    return next((name for name in ("nightly", "fast") if item.get_closest_marker(name)), "test")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tiers before ``-m`` looks at them, and the pools' tests, each of which live in one process of the two."""
    _mark_nightly(items, whole=not any("::" in name for name in config.args))
    for item in items:
        if _is_fast(item.path) and not (item.get_closest_marker("nightly") or item.get_closest_marker("slow")):
            item.add_marker("fast")
        item.user_properties.append(("tier", tier(item)))  # a report takes it to the process that writes
        # Asked of a worker, "dist" is always "no"; this is what xdist itself looks at there.
        if config.getoption("loadgroup", False):
            item.add_marker(pytest.mark.xdist_group(_group(_place(item.path))))
    if config.getoption("loadgroup", False):
        seconds = _seconds()
        items.sort(key=lambda item: -seconds[_group(_place(item.path))])


@functools.cache
def _is_fast(file: Path) -> bool:
    return _place(file).startswith(FAST) and not ENGINES.search(file.read_text(encoding="utf-8"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of files without a fast test not even the imports are done."""
    asked = config.option.markexpr == "fast" and collection_path.name.startswith("test_")
    return True if asked and not _is_fast(collection_path) else None


def pytest_collection_finish() -> None:
    """The million objects of imports and of tests stay to the end: no collection need look at them."""
    gc.freeze()
    gc.enable()


def _mark_nightly(items: Iterable[pytest.Item], whole: bool) -> None:
    cases: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    named: dict[str, set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("everyday"):
            test, _, case = item.nodeid.partition("[")
            cases[test][case.removesuffix("]")] = item
            named[test] = {*mark.args}
    for test, found in cases.items():
        if whole and (absent := named[test] - found.keys()):
            raise pytest.UsageError(f"{test}: everyday{sorted(absent)}: its cases are {sorted(found)}")
        for case, item in found.items():
            if case not in named[test]:
                item.add_marker("nightly")


def _place(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _group(place: str) -> str:
    return next((name for name in TOGETHER if place.startswith(name)), place)


def _seconds() -> Counter[str]:
    """Group → how long it took when it was recorded. The longest begins first, so that processes end together."""
    found = Counter[str]()
    for kept in json.loads(DURATIONS.read_text(encoding="utf-8")).values():
        for name, took in kept["tests"].items():
            found[_group(name.partition("::")[0])] += took
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Groups reach xdist's scheduler in the names of tests. From pytest 9.2 on xdist 3.8 writes them where nobody
    reads: without a word every test goes anywhere, and both processes start every pool."""
    lost = [name for name in ids if "@" not in name]
    if lost and node.config.getoption("dist") == "loadgroup":
        pytest.exit(
            f"pytest {pytest.__version__} does not tell pytest-xdist the groups of {len(lost)} tests: "
            "install the versions of constraints.txt",
            returncode=4,
        )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """So that nobody takes a part of the cases for all of them."""
    chosen = config.option.markexpr
    return [f"tests that are {chosen}; make test-all runs every one"] if chosen else []


@pytest.fixture
def golden_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An engine's finished run (tests/support/golden.py), in a copy of this test's own: its run directory."""
    from tests.support import golden

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "golden"

    def copy(engine: str) -> Path:
        return shutil.copytree(golden.made(engine, shared) / "run", tmp_path / "golden" / engine)

    return copy


_took: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
"""Tier → test → seconds with its fixtures."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if of := dict(report.user_properties).get("tier"):
        _took[str(of)][report.nodeid.partition("@")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that took a twentieth of a second or more, by tier."""
    if session.config.getoption("--write-durations") and not hasattr(session.config, "workerinput"):
        kept = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        for of, tests in _took.items():
            kept[of] = {
                "seconds": round(sum(tests.values())),
                "tests": {name: round(took, 2) for name, took in sorted(tests.items()) if took >= 0.05},
            }
        DURATIONS.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n")

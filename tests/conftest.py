"""Decides which tests run beside each other (``pytest -n 2 --dist loadgroup``) and which run today (``--days 4``)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.program import todays

TOGETHER = ("accuracy", "deepspeed", "diagnose/test_probe.py", "megatron", "test_end_to_end.py", "training")
"""Directories and files whose tests share something that is costly: a pool of processes (tests/workers.py), a run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """xdist hands its workers the values that these have here, so all of them agree on the day."""
    parser.addoption(
        "--days", type=int, default=1, help="run a case in this many of tests marked rotated, others every day; 1: all"
    )
    parser.addoption(
        "--day", type=int, default=datetime.date.today().toordinal(), help="the day's number in the calendar"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "rotated: the cases of this test take turns (--days); rotated(name): so do all tests of that name"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """So that nobody takes a part of the cases for all of them."""
    days = config.getoption("days")
    return [f"rotated tests: a case in {days} today, all with --days 1"] if days > 1 else []


def left_out(items: Iterable[pytest.Item], days: int, day: int) -> list[pytest.Item]:
    """Tests whose turn it is on another day. Of a test with fewer cases than days, one runs every day."""
    rotated: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("rotated"):
            rotated.setdefault(mark.args or (item.nodeid.partition("[")[0],), []).append(item)
    return [
        item
        for cases in rotated.values()
        for kept in [set(todays(cases, min(days, len(cases)), day))]
        for item in cases
        if item not in kept
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each pool lives in one process of the two; the tests of other directories go wherever there is room."""
    if absent := set(left_out(items, config.getoption("days"), config.getoption("day"))):
        config.hook.pytest_deselected(items=[*absent])
        items[:] = [item for item in items if item not in absent]
    # Asked of a worker, "dist" is always "no"; this is what xdist itself looks at there.
    if not config.getoption("loadgroup", False):
        return
    root = Path(__file__).parent
    for item in items:
        for group in _groups(item.path.relative_to(root)):
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Groups reach xdist's scheduler in the names of tests. From pytest 9.2 on xdist 3.8 writes them where nobody
    reads: without a word every test goes anywhere, and both processes start every pool."""
    lost = [name for name in ids if _groups(Path(name.partition("::")[0]).relative_to("tests")) and "@" not in name]
    if lost and node.config.getoption("dist") == "loadgroup":
        pytest.exit(
            f"pytest {pytest.__version__} does not tell pytest-xdist the groups of {len(lost)} tests: "
            "install the versions of constraints.txt",
            returncode=4,
        )


def _groups(place: Path) -> set[str]:
    return {place.parts[0], place.as_posix()} & set(TOGETHER)

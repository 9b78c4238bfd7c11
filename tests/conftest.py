"""Decides which tests may run beside each other under ``pytest -n 2 --dist loadgroup`` (``make test``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TOGETHER = ("accuracy", "deepspeed", "diagnose/test_probe.py", "megatron", "test_end_to_end.py", "training")
"""Directories and files whose tests share something that is costly: a pool of processes (tests/workers.py), a run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each pool lives in one process of the two; the tests of other directories go wherever there is room."""
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

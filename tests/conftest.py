"""Which tests may run beside each other under ``pytest -n 2 --dist loadgroup`` (``make test``)."""

from __future__ import annotations

from pathlib import Path

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
        place = item.path.relative_to(root)
        for group in {place.parts[0], place.as_posix()} & set(TOGETHER):
            item.add_marker(pytest.mark.xdist_group(group))

"""Which tests may run beside each other under ``pytest -n 2 --dist loadgroup`` (``make test``)."""

from __future__ import annotations

from pathlib import Path

import pytest

TOGETHER = ("accuracy", "deepspeed", "megatron", "training")
"""Directories whose tests share something that is costly: a pool of processes (tests/workers.py), a fitted table."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each pool lives in one process of the two; the tests of other directories go wherever there is room."""
    if config.getoption("dist", "no") != "loadgroup":
        return
    root = Path(__file__).parent
    for item in items:
        package = item.path.relative_to(root).parts[0]
        if package in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(package))

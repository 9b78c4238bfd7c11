"""One gloo process for the tests that need no second one."""

from __future__ import annotations

import pytest

from tests.support.alone import process_group_of_one


@pytest.fixture
def one_process():
    """One process group of one rank (tests/support/alone.py)."""
    with process_group_of_one():
        yield

"""Specs, cost model and planner."""

import pytest

pytest.register_assert_rewrite("tests.planning.shapes")  # its by_hand makes tests

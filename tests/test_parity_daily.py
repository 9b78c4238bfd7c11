"""What CI runs of the parity table and of rotated tests in a day: in three days all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.program import todays
from benchmarks.system_tests.parity.__main__ import LAUNCHED
from benchmarks.system_tests.parity.cases import CASES
from tests.conftest import left_out


@dataclass(frozen=True)
class Case:
    """What ``left_out`` reads of a pytest item."""

    nodeid: str
    rotated: bool = True

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.rotated.mark if self.rotated and name == "rotated" else None


def test_three_days_have_everything_once() -> None:
    for things in (CASES, LAUNCHED):
        names = [getattr(thing, "name", thing) for thing in things]
        found = [name for day in range(739_000, 739_003) for name in todays(names, 3, day)]
        assert sorted(found) == sorted(names)
        assert todays(names, 1) == names


@pytest.mark.parametrize("cases", range(1, 8))
def test_a_rotated_test_runs_every_day_and_all_its_cases_in_three(cases: int) -> None:
    items: list[Any] = [Case(f"test_one[{number}]") for number in range(cases)]
    days = [[item for item in items if item not in left_out(items, 3, day)] for day in range(739_000, 739_003)]
    assert all(days)
    assert {item.nodeid for day in days for item in day} == {item.nodeid for item in items}
    assert left_out(items, 1, 739_000) == []
    assert left_out([Case("test_one", rotated=False)], 3, 739_000) == []  # type: ignore[list-item]

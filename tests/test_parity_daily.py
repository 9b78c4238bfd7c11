"""What CI runs of the parity table in a day: in three days all of it."""

from __future__ import annotations

from benchmarks.program import todays
from benchmarks.system_tests.parity.__main__ import LAUNCHED
from benchmarks.system_tests.parity.cases import CASES


def test_three_days_have_everything_once() -> None:
    for things in (CASES, LAUNCHED):
        names = [getattr(thing, "name", thing) for thing in things]
        found = [name for day in range(739_000, 739_003) for name in todays(names, 3, day)]
        assert sorted(found) == sorted(names)
        assert todays(names, 1) == names

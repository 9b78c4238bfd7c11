"""Divisors of a number, its doubles, and a choice of numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def one_of(values: Iterable[object]) -> str:
    """``1, 2 or 4``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def doubled(least: int, most: int) -> Iterator[int]:
    """``least``, twice as many, and so on, up to ``most``."""
    while least <= most:
        yield least
        least *= 2

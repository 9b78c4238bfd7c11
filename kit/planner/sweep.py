"""Asks the same of several variants of a request, and keeps why one of them has no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kit.errors import PlanError
from kit.planner.request import Request

Found = TypeVar("Found")


@dataclass(frozen=True)
class Variant:
    """A request under a name."""

    label: str
    request: Request


Asked = TypeVar("Asked", bound=Variant)


class Outcome(NamedTuple, Generic[Asked, Found]):
    """What was found for a variant; or None, and why."""

    variant: Asked
    found: Found | None
    why_none: str = ""


def sweep(variants: Iterable[Asked], ask: Callable[[Asked], Found]) -> Iterator[Outcome[Asked, Found]]:
    """The outcome of each variant, in their order and one at a time: whoever stops reading asks nothing more.

    A ``PlanError`` is a variant's own outcome; other errors end the sweep.
    """
    for variant in variants:
        try:
            outcome = Outcome(variant, ask(variant))
        except PlanError as refused:
            outcome = Outcome(variant, None, str(refused))
        yield outcome

"""A rule is a function that refuses one property of a workload, registered for one or more engines.

Most rules are a predicate and a message. If the message depends on the violation, the function returns the message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kit.cost.workload import Workload
from kit.specs.layout import ENGINES, EngineName

Check = Callable[[Workload], bool | str | None]
"""Returns whether the workload breaks the rule, or the message; False or None if it does not."""
Message = str | Callable[[Workload], str]
"""The message of a broken rule; empty if the check returns the message."""
C = TypeVar("C", bound=Check)


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    """The rule's name."""
    message: str
    """Value, rule and nearest fix, on one line."""

    def __str__(self) -> str:
        return self.message


class Rule(NamedTuple):
    """One refusal."""

    check: Check
    message: Message


REGISTERED: dict[EngineName, dict[str, Rule]] = {engine: {} for engine in ENGINES}
"""Engine → name → rule, in the order of messages. Filled by ``rule`` when the files of this folder are imported."""


def rule(*engines: EngineName, message: Message = "") -> Callable[[C], C]:
    """Register a check under its own name, for these engines or, without any, for every engine."""

    def register(check: C) -> C:
        for engine in engines or ENGINES:
            assert check.__name__ not in REGISTERED[engine], f"two rules are called {check.__name__}"
            REGISTERED[engine][check.__name__] = Rule(check, message)
        return check

    return register

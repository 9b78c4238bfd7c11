"""What a rule is: a function that refuses one thing of a workload, registered for the engines it speaks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kit.cost.workload import Workload
from kit.specs.layout import ENGINES, EngineName

Check = Callable[[Workload], str | None]
"""Returns the message of a violation, or None."""


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    """The rule's name."""
    message: str
    """Value, rule and nearest fix, on one line."""

    def __str__(self) -> str:
        return self.message


REGISTERED: dict[EngineName, dict[str, Check]] = {engine: {} for engine in ENGINES}
"""Engine → name → check, in the order of messages. Filled by ``rule`` when the files of this folder are imported."""


def rule(*engines: EngineName) -> Callable[[Check], Check]:
    """Register a check under its own name, for these engines or, without any, for every engine."""

    def register(check: Check) -> Check:
        for engine in engines or ENGINES:
            assert check.__name__ not in REGISTERED[engine], f"two rules are called {check.__name__}"
            REGISTERED[engine][check.__name__] = check
        return check

    return register

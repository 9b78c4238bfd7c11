"""Rows of the checks of a machine: a result, and the condition under which it is that.

"shm": (
    Row("failure", lambda h: to_gib(h["shm_free_bytes"]) < 1, "/dev/shm is small", "mount -o remount,size=16G"),
    good("large enough"),
)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kit.addons.doctor.machines.facts import Facts
from kit.addons.doctor.machines.needs import Requirements
from kit.preflight.check_result import CheckResult, State


@dataclass(frozen=True)
class Host:
    """A machine beside what a plan requires of it."""

    facts: Facts
    required: Requirements | None
    """None without a plan."""
    gpu: dict[str, Any] = field(default_factory=dict)
    """The GPU that is looked at."""

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]

    def needs(self, name: str, without: Any = 0) -> Any:
        """A requirement of the plan; ``without`` where there is no plan."""
        return without if self.required is None else getattr(self.required, name)


Of = Callable[[Host], Any]
"""What depends on the machine."""


@dataclass(frozen=True)
class Row:
    """A result of a check, and when it is that."""

    state: State | Callable[[Host], State]
    when: Of
    said: str | Of
    fix: str | Of = ""

    def of(self, check: str, host: Host) -> CheckResult:
        """The result."""
        state = self.state if isinstance(self.state, str) else self.state(host)
        said, fix = (text if isinstance(text, str) else text(host) for text in (self.said, self.fix))
        return CheckResult(check, state, (), said, fix)


def good(said: str | Of) -> Row:
    """The last row of a check: nothing is wrong."""
    return Row("ok", lambda h: True, said)

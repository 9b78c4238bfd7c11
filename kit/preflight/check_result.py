"""``CheckResult``, the result of every check of run directories and hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kit.errors import RunDirectoryError

State = Literal["ok", "warning", "failure", "skipped"]
HERE = "localhost"
"""This machine."""


@dataclass(frozen=True)
class CheckResult:
    """One check on one host, or between hosts."""

    check: str
    state: State
    hosts: tuple[str, ...]
    said: str
    """The finding, with its values."""
    fix: str = ""
    """What to do; empty if nothing is wrong."""


def ok(check: str, said: str, host: str = HERE) -> CheckResult:
    """Nothing is wrong."""
    return CheckResult(check, "ok", (host,), said)


def warning(check: str, said: str, fix: str, host: str = HERE) -> CheckResult:
    """The job will run, but slower or with a surprise."""
    return CheckResult(check, "warning", (host,), said, fix)


def failure(check: str, said: str, fix: str, host: str = HERE) -> CheckResult:
    """The job will not run, or will give wrong results."""
    return CheckResult(check, "failure", (host,), said, fix)


def skipped(check: str, said: str, host: str = HERE) -> CheckResult:
    """The check could not run; ``said`` says what is missing."""
    return CheckResult(check, "skipped", (host,), said)


def judge(check: str, good: str, *rules: tuple[bool, Callable[[str, str, str], CheckResult], str, str]) -> CheckResult:
    """The result of the first broken rule; ok with ``good`` if none is broken.

    ``rules``: (whether it is broken, ``failure`` or ``warning``, the finding, the fix)."""
    return next((make(check, said, fix) for broken, make, said, fix in rules if broken), ok(check, good))


def require(*results: CheckResult | None) -> None:
    """Raises ``RunDirectoryError`` with every failure and its fix, one per line."""
    failed = ["; ".join(filter(None, (each.said, each.fix))) for each in results if each and each.state == "failure"]
    if failed:
        raise RunDirectoryError("\n".join(failed))

"""``CheckResult``, the result of every check of run directories and hosts, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kit.errors import RunDirectoryError

State = Literal["ok", "warning", "failure", "skipped"]
_ORDER: tuple[State, ...] = ("failure", "warning", "skipped", "ok")
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


def merged(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Joins equal results of several hosts. Failures come first, then the order of the checks."""
    groups: dict[tuple[str, State, str, str], dict[str, None]] = {}
    for result in results:
        groups.setdefault((result.check, result.state, result.said, result.fix), {}).update(dict.fromkeys(result.hosts))
    found = [CheckResult(check, state, tuple(hosts), said, fix) for (check, state, said, fix), hosts in groups.items()]
    return sorted(found, key=lambda result: _ORDER.index(result.state))


def table(results: Sequence[CheckResult], seconds: float) -> str:
    """A text table: failures and warnings first, with their fixes."""
    lines = []
    for result in results:
        hosts = ", ".join(result.hosts) if len(result.hosts) <= 4 else f"{len(result.hosts)} hosts"
        lines.append(f"{result.state:8} {result.check:16} {hosts:18} {result.said}")
        if result.fix:
            lines.append(f"{'':8} {'':16} {'':18} → {result.fix}")
    counts = [f"{sum(result.state == state for result in results)} {state}" for state in _ORDER]
    return "\n".join([*lines, f"{', '.join(counts)}; {seconds:.1f} s"])

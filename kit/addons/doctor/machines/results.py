"""Results of several hosts: joined, ordered, and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from kit.preflight.check_result import CheckResult, State

_ORDER: tuple[State, ...] = ("failure", "warning", "skipped", "ok")


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

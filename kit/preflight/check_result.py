"""What a check found, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "failure", "skipped"]
ORDER: tuple[State, ...] = ("failure", "warning", "skipped", "ok")


@dataclass(frozen=True)
class Verdict:
    """One check on one host, or between hosts."""

    check: str
    state: State
    hosts: tuple[str, ...]
    said: str
    """What was found, with its values."""
    fix: str = ""
    """What to do; empty where nothing is wrong."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


def ok(check: str, host: str, said: str) -> Verdict:
    """Nothing wrong."""
    return Verdict(check, "ok", (host,), said)


def warning(check: str, host: str, said: str, fix: str) -> Verdict:
    """It will run, slower or with a surprise."""
    return Verdict(check, "warning", (host,), said, fix)


def failure(check: str, host: str, said: str, fix: str) -> Verdict:
    """It will not run, or run wrong."""
    return Verdict(check, "failure", (host,), said, fix)


def skipped(check: str, host: str, said: str) -> Verdict:
    """Nothing to look at; ``said`` says what is missing."""
    return Verdict(check, "skipped", (host,), said)


def merged(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same words of several hosts are one verdict; failures first, then in the order of the checks."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for verdict in verdicts:
        key = (verdict.check, verdict.state, verdict.said, verdict.fix)
        groups.setdefault(key, []).extend(host for host in verdict.hosts if host not in groups.get(key, ()))
    found = [
        Verdict(check, state, tuple(hosts), said, fix)  # type: ignore[arg-type]  # state is one of State
        for (check, state, said, fix), hosts in groups.items()
    ]
    return sorted(found, key=lambda verdict: ORDER.index(verdict.state))


def table(verdicts: Sequence[Verdict], seconds: float) -> str:
    """For people: what is wrong first, with what to do."""
    lines = []
    for verdict in verdicts:
        hosts = ", ".join(verdict.hosts) if len(verdict.hosts) <= 4 else f"{len(verdict.hosts)} hosts"
        lines.append(f"{verdict.state:8} {verdict.check:16} {hosts:18} {verdict.said}")
        if verdict.fix:
            lines.append(f"{'':8} {'':16} {'':18} → {verdict.fix}")
    counts = [f"{sum(v.state == state for v in verdicts)} {state}" for state in ORDER]
    return "\n".join([*lines, f"{', '.join(counts)}; {seconds:.1f} s"])

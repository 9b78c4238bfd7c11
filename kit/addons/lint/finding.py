"""A finding of lint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

Severity = Literal["error", "warning", "note"]
"""error: it stops the run, or silently runs something else. warning: it costs memory, speed or a surprise later.
note: right only under a condition that the file does not show."""

REMOVE = object()
"""The new value of a key that a fix removes."""
Changes = tuple[tuple[tuple[str, ...], Any], ...]
"""(path of a key, its new value or ``REMOVE``)."""


class FindingJson(TypedDict):
    """A finding as ``kit lint --json`` prints it."""

    rule: str
    severity: Severity
    file: str
    line: int | None
    key: str
    why: str
    fix: str
    fixable: bool
    """Whether ``--write-fixed`` mends it."""


@dataclass(frozen=True)
class Finding:
    """One finding. ``changes``: what ``--write-fixed`` changes; empty if a person has to decide."""

    rule: str
    severity: Severity
    file: str
    line: int | None
    key: str
    """Dotted; empty for the file as a whole."""
    why: str
    fix: str
    changes: Changes = ()

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f"{self.key}: " if self.key else ""
        return f"{place}: {self.severity}: [{self.rule}] {key}{self.why}; {self.fix}"

    def as_json(self) -> FindingJson:
        """Plain values."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "key": self.key,
            "why": self.why,
            "fix": self.fix,
            "fixable": bool(self.changes),
        }

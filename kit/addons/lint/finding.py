"""A finding of lint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field

Severity = Literal["error", "warning", "note"]
"""error: it stops the run, or silently runs something else. warning: it costs memory, speed or a surprise later.
note: right only under a condition that the file does not show."""

REMOVE = object()
"""The new value of a key that a fix removes."""
Changes = tuple[tuple[tuple[str, ...], Any], ...]
"""(path of a key, its new value or ``REMOVE``)."""


@dataclass(frozen=True)
class Finding:
    """One finding. ``changes``: what ``--write-fixed`` changes, not in JSON; empty if a person has to decide."""

    rule: str
    severity: Severity
    file: str
    line: int | None
    key: str
    """Dotted; empty for the file as a whole."""
    why: str
    fix: str
    changes: Annotated[Changes, Field(exclude=True)] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fixable(self) -> bool:
        """Whether ``--write-fixed`` mends it."""
        return bool(self.changes)

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f"{self.key}: " if self.key else ""
        return f"{place}: {self.severity}: [{self.rule}] {key}{self.why}; {self.fix}"

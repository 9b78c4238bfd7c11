"""Patterns of failures in logs, from ``patterns.yaml``: each matches one line, and names its cause, meaning and fix.

A meaning or fix may name groups of its expression, as ``re.Match.expand`` does: ``\\g<library>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from kit.specs import strict_yaml


@dataclass(frozen=True)
class Pattern:
    """A cause of failure that one line of a log shows."""

    cause: str
    signs: tuple[str, ...]
    """Every matching line has one of these words. The log is searched for these first, because that is faster."""
    regex: re.Pattern[str]
    weight: int
    """3: a root cause; 2: usually a root cause; 1: a consequence of another failure."""
    meaning: str
    fix: str
    phases: Mapping[str, str]
    """Phase of the run (``phases.py``) → the fix there."""
    source: str | None
    """The address of a public thread with such a line."""

    def shows(self, text: str) -> re.Match[str] | None:
        """The match of the pattern in a line."""
        return self.regex.search(text) if any(sign in text for sign in self.signs) else None


def _patterns() -> tuple[Pattern, ...]:
    text = files("kit.addons.doctor.logs").joinpath("patterns.yaml").read_text(encoding="utf-8")
    rows = strict_yaml.parse_text(text, "patterns.yaml").data
    return tuple(
        Pattern(
            cause=row.get("cause", name),
            signs=tuple(row["signs"]),
            regex=re.compile(row["regex"]),
            weight=row["weight"],
            meaning=row["meaning"],
            fix=row["fix"],
            phases=row.get("phases", {}),
            source=row.get("source"),
        )
        for name, row in rows.items()
    )


PATTERNS = _patterns()
ENDED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (\d+) via \S+, forcefully exiting")
"""torch/distributed/elastic/multiprocessing/api.py: torchrun then kills processes that only waited for another."""
WORKER_FAILED = re.compile(
    r"(?:--local[_-]rank[= ](?P<local>\d+).*)?exits with return code = (?P<code>[1-9]\d*)|"
    r"(?P<host>\S+): task (?P<task>\d+): Exited with exit code (?P<status>\d+)|"
    r"failed \(exitcode: (?P<torchrun>[1-9]\d*)\)"
)
"""A message of DeepSpeed's launcher, srun or torchrun about a process that ended with an error. torchrun's line has the
rank on that node alone; its table, if it comes, has the rank."""
RESERVED = re.compile(r"Tried to allocate ([\d.]+ [KMG]iB).*?([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated")
"""CUDACachingAllocator.cpp: an out-of-memory with reserved but fragmented memory."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (torch 2.9 and later also read PYTORCH_ALLOC_CONF)"
DOWNLOADING = re.compile(r"(?i)\bdownloading\b|fetching \d+ files|Downloading shards")

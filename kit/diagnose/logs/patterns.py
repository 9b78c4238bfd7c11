"""Patterns of failures in logs, from ``patterns.yaml``: each matches one line, and names its cause, meaning and fix."""

from __future__ import annotations

import re
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
    """3: a root cause; 2: usually a root cause; 1: a consequence of a failure on another rank."""
    meaning: str
    fix: str
    source: str | None
    """The address of a public thread with such a line."""

    def shows(self, text: str) -> bool:
        """Whether a line matches the pattern."""
        return any(sign in text for sign in self.signs) and self.regex.search(text) is not None


def _patterns() -> tuple[Pattern, ...]:
    text = files("kit.diagnose.logs").joinpath("patterns.yaml").read_text(encoding="utf-8")
    rows = strict_yaml.parse_text(text, "patterns.yaml").data
    return tuple(
        Pattern(
            cause=cause,
            signs=tuple(row["signs"]),
            regex=re.compile(row["regex"]),
            weight=row["weight"],
            meaning=row["meaning"],
            fix=row["fix"],
            source=row.get("source"),
        )
        for cause, row in rows.items()
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
PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "optimizer step",
        re.compile(r"\b(?:optimizer|optim|adamw?)\b.*\bstep\b|_take_model_step|in step\b|optimizer\.step|in apply\b"),
    ),
    ("backward", re.compile(r"\.backward\(|in backward\b|autograd.*backward|run_backward")),
    ("loading the model", re.compile(r"from_pretrained|in build_model|load_state_dict|import_state|zero\.Init")),
    ("checkpoint", re.compile(r"save_checkpoint|in save\b|torch\.save|checkpoint/")),
    ("forward", re.compile(r"in forward\b|\.forward\(|_call_impl")),
)
"""(phase, pattern of a frame): the first match decides the phase, innermost frames first."""

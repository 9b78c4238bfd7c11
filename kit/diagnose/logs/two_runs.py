"""Two runs that wrote into one run directory at once: ``metrics.jsonl`` has each step once, in order, after resumes and
rewinds too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kit.diagnose.logs.cause import Cause
from kit.diagnose.logs.reading import LINE_BYTES

_NAME = "metrics.jsonl"
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')


def two_runs(paths: Iterable[Path]) -> list[Cause]:
    """A cause for each ``metrics.jsonl`` among the logs, in the directories named or beside the logs, whose steps go
    back."""
    return [cause for path in metrics_files(paths) if (cause := _of(path)) is not None]


def metrics_files(paths: Iterable[Path]) -> list[Path]:
    """Each ``metrics.jsonl`` among the logs, in the directories named or beside the logs."""
    files = {path if path.name == _NAME else (path if path.is_dir() else path.parent) / _NAME for path in paths}
    return [path for path in sorted(files) if path.is_file()]


def _of(path: Path) -> Cause | None:
    last, number, again, first = 0, 0, 0, (0, 0, "")
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(LINE_BYTES), b""):
            number += line.endswith(b"\n")
            if match := _STEP.match(line):
                step = int(match[1])
                if step <= last:
                    first = first if again else (step, number, line.decode(errors="replace").strip())
                    again += 1
                last = max(last, step)
    if not again:
        return None
    step, number, evidence = first
    return Cause(
        cause="two-runs",
        meaning=f"two runs wrote into {path.parent.name} at once: {again} steps stand in {path.name} again, from step "
        f"{step} on, though {last} were reached",
        fix="end all but one; metrics and checkpoints since that step are of both: go back "
        "to a checkpoint before it, or train again in a new run directory",
        ranks=(),
        place=f"{path}:{number}",
        evidence=evidence,
        weight=3,
        step=step,
    )

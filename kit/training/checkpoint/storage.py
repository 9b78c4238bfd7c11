"""The directories of checkpoints: their names, which to keep, whether one more fits, their size and monthly cost."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from kit.cost.reliability import STORAGE_USD_PER_GB_MONTH
from kit.errors import CheckpointError
from kit.planner.plan import Plan
from kit.specs.run import CheckpointSpec
from kit.units import GB, to_gib

MANIFEST = "manifest.json"
"""The file with the hashes of all others, which is written and copied last: a directory without it is none."""
_NAME = re.compile(r"step-(\d{8})")


def step_of(name: str) -> int | None:
    """Step of the name of a checkpoint's directory; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def name_of(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(root: Path) -> dict[int, Path]:
    """Step → directory of the checkpoints in a directory, complete or not; the newest first. Raises OSError."""
    listed = root.iterdir() if root.is_dir() else ()
    found = {step_of(path.name): path for path in listed if path.is_dir()}
    return {step: path for step, path in sorted(found.items(), key=lambda each: -(each[0] or 0)) if step is not None}


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has a manifest."""
    return (directory / MANIFEST).is_file()


def retained_steps(steps: Sequence[int], last: int, every: int | None) -> list[int]:
    """Steps whose checkpoints to keep: the ``last`` newest steps, and all multiples of ``every``. ``steps``: newest
    first."""
    return [step for n, step in enumerate(steps) if n < last or (every is not None and step % every == 0)]


def steps_kept(last_step: int, spec: CheckpointSpec) -> list[int]:
    """Steps whose checkpoints exist after a run that ended with ``last_step``, oldest first."""
    every = spec.every_steps
    saved = {last_step, *(range(every, last_step + 1, every) if every else ())}
    return sorted(retained_steps(sorted(saved, reverse=True), spec.keep_last, spec.keep_every_steps))


def predicted_bytes(plan: Plan, last_step: int, spec: CheckpointSpec) -> float:
    """Predicted bytes of all checkpoints after a run."""
    return plan.predicted.operation.checkpoint_gb * GB * len(steps_kept(last_step, spec))


def found_bytes(root: Path) -> int:
    """Bytes of all files below a directory. Raises OSError."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def usd_per_month(num_bytes: float) -> float:
    """Monthly cost of ``num_bytes`` in object storage, at list price."""
    return num_bytes / GB * STORAGE_USD_PER_GB_MONTH


def require_disk_space(directory: Path, needed_bytes: int) -> None:
    """Raises CheckpointError if the file system of ``directory`` (or of its nearest existing parent) has less free
    space than ``needed_bytes``."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise CheckpointError(
            f"a checkpoint takes {_words(needed_bytes)} and {existing} has {_words(free)} left; free some space, or "
            f"keep fewer (run.checkpoint.keep_last)"
        )


def _words(num_bytes: int) -> str:
    gib = to_gib(num_bytes)
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes} bytes"

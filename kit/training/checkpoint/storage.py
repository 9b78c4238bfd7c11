"""Disk space of checkpoints: which to keep, whether one more fits, their total size and its monthly cost."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from kit.cost.reliability import STORAGE_USD_PER_GB_MONTH, exchange_bytes
from kit.errors import CheckpointError
from kit.planner.plan import Plan
from kit.specs.run import CheckpointSpec
from kit.units import GB, to_gib


def kept(steps: Sequence[int], last: int, every: int | None) -> list[int]:
    """Steps whose checkpoints to keep: the ``last`` newest steps, and all multiples of ``every``. ``steps``: newest
    first."""
    return [step for n, step in enumerate(steps) if n < last or (every is not None and step % every == 0)]


def steps_kept(last_step: int, spec: CheckpointSpec) -> list[int]:
    """Steps whose native checkpoints exist after a run that ended with ``last_step``, oldest first."""
    every = spec.every_steps
    saved = {last_step, *(range(every, last_step + 1, every) if every else ())}
    return sorted(kept(sorted(saved, reverse=True), spec.keep_last, spec.keep_every_steps))


def predicted_bytes(plan: Plan, last_step: int, spec: CheckpointSpec, exchange: bool) -> float:
    """Predicted bytes of all checkpoints after a run."""
    one = plan.predicted.operation.checkpoint_gb * GB
    exported = exchange_bytes(plan.workload) if exchange else 0.0
    return one * len(steps_kept(last_step, spec)) + exported


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

"""What the checkpoints of a run take on disk, and what a month of it costs: predicted from the plan, and found."""

from __future__ import annotations

from pathlib import Path

from kit.cost.reliability import STORAGE_USD_PER_GB_MONTH, exchange_bytes
from kit.planner.plan import Plan
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.engine_checkpoint import kept
from kit.units import GB


def steps_kept(last_step: int, spec: CheckpointSpec) -> list[int]:
    """Steps whose native checkpoints are there when a run has ended after ``last_step``, oldest first."""
    every = spec.every_steps
    saved = {last_step, *(range(every, last_step + 1, every) if every else ())}
    return sorted(kept(sorted(saved, reverse=True), spec.keep_last, spec.keep_every_steps))


def predicted_bytes(plan: Plan, last_step: int, spec: CheckpointSpec, exchange: bool) -> float | None:
    """Bytes of all checkpoints that a run leaves, by its plan. None where the plan does not predict them."""
    operation = plan.predicted.operation
    if operation is None:
        return None
    one = operation.checkpoint_gb * GB
    exported = exchange_bytes(plan.workload) if exchange else 0.0
    return one * len(steps_kept(last_step, spec)) + exported


def found_bytes(root: Path) -> int:
    """Bytes of all files below a directory, whoever wrote them. Raises OSError."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def usd_per_month(num_bytes: float) -> float:
    """Cost of keeping so many bytes in object storage, at list price."""
    return num_bytes / GB * STORAGE_USD_PER_GB_MONTH

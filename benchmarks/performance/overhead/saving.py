"""How long training stands still for checkpoints, at once and by a thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kit.engines.torch.engine import TorchEngine
from kit.rehearsal.processes import metrics
from kit.training.loop import train
from tests.support import small_run
from tests.training.alone import process_group_of_one

EVERY = 20
STEPS = 61


@dataclass(frozen=True)
class Stall:
    """Time that one run waited for its checkpoints."""

    share: float
    """Stalls over the time of all steps but the first."""
    stall_ms: float
    """Milliseconds that one checkpoint stops training."""
    step_ms: float
    checkpoint_mib: float


def stall(directory: Path, asynchronous: bool) -> Stall:
    """A model of 13 million parameters, saved every 20 steps; the checkpoint after the last step is not counted."""
    words = (
        f"run.steps={STEPS}",
        f"run.checkpoint.every_steps={EVERY}",
        f"run.checkpoint.asynchronous={str(asynchronous).lower()}",
    )
    with process_group_of_one():
        rundir = small_run.emit(
            directory / f"saved-{asynchronous}", *words, hidden=512, layers=3, seq_length=256, batch=2
        )
        engine = TorchEngine(rundir)
        summary = train(engine, rundir, export_at_end=False)
        engine.close()
    rows = metrics(rundir.path)
    stalls = [row["checkpoint_s"] for row in rows[:-1] if row["checkpoint_s"] is not None]
    steps = [row["step_time_s"] for row in rows[1:]]
    assert len(stalls) == (STEPS - 1) // EVERY
    return Stall(
        share=sum(stalls) / (sum(steps) + sum(stalls)),
        stall_ms=1000 * sum(stalls) / len(stalls),
        step_ms=1000 * sum(steps) / len(steps),
        checkpoint_mib=1024 * (summary.measured_checkpoint_gib or 0.0),
    )

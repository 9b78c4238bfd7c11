"""The native checkpoints of a run: where they go, how long training stands still for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kit.engines.base import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint.background import Background
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.engine_checkpoint import NativeCheckpoints
from kit.training.schedule import run_length

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


class Saving:
    """Written at once, or by a thread; made by all ranks together."""

    def __init__(self, rundir: RunDirectory) -> None:
        plan, spec = rundir.plan, rundir.run.checkpoint
        operation = plan.predicted.operation
        self.checkpoints = NativeCheckpoints(
            root=rundir.path / "checkpoints",
            plan_hash=plan.digest,
            world_size=plan.layout.world_size,
            keep_last=spec.keep_last,
            keep_every_steps=spec.keep_every_steps,
            expected_bytes=0 if operation is None else int(1e9 * operation.checkpoint_gb),
            length=run_length(plan, rundir.run),
            model=f"{plan.layout.engine} {plan.model_digest}",
        )
        self._background = Background(self.checkpoints) if spec.asynchronous else None
        self.stalls_s: list[float] = []
        """How long training stood still for each checkpoint."""
        self.last_step: int | None = None
        """Of the newest checkpoint that this process has begun to write."""

    def save(self, engine: Engine, counters: Counters, wait: bool) -> str | None:
        """Collective. Returns why there is none, or None; asynchronously that is of the one before, unless ``wait``."""
        began = time.perf_counter()
        try:
            if self._background is None:
                self.checkpoints.save(engine, counters)
            else:
                self._background.start(engine, counters)
                if wait:
                    self._background.wait()
            self.last_step = counters.step
        except CheckpointError as error:
            return str(error)
        finally:
            self.stalls_s.append(time.perf_counter() - began)
        return None

    def settle(self) -> str | None:
        """Collective. Wait for what a thread is writing; returns why it could not be written, or None."""
        try:
            if self._background is not None:
                self._background.wait()
        except CheckpointError as error:
            return str(error)
        return None

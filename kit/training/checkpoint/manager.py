"""Writes the checkpoints of a run, at once or in a thread, and measures how long training waits for them.

With ``run.checkpoint.asynchronous`` training waits only until the state is copied; a thread writes the copy. The thread
has its own process group (gloo), so that its collectives do not mix with those of training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch.distributed as dist

from kit.engines.protocol import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.store import State, state_of
from kit.training.counters import Counters, RunLength
from kit.training.data.chat_template import chat_template_of

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


class CheckpointManager:
    """Saves one checkpoint at a time, at once or in a thread. Every method is collective."""

    def __init__(self, kept: RunCheckpoints, asynchronous: bool) -> None:
        self.kept, self._asynchronous = kept, asynchronous
        self._group = dist.new_group(backend="gloo") if asynchronous and dist.is_initialized() else None
        self._writing: Future[None] | None = None
        self.finished: Callable[[], None] = lambda: None
        """Called after each checkpoint that was written."""
        self.stalls_s: list[float] = []
        """Seconds that training waited for each checkpoint: for the write; or, if asynchronous, for the previous
        checkpoint and the copy."""

    @classmethod
    def open(cls, rundir: RunDirectory, length: RunLength) -> CheckpointManager:
        """Open the checkpoints of a run directory with its settings."""
        plan, spec = rundir.plan, rundir.run.checkpoint
        kept = RunCheckpoints(
            root=rundir.path / "checkpoints",
            plan=plan,
            keep_last=spec.keep_last,
            keep_every_steps=spec.keep_every_steps,
            length=length,
            chat_template=chat_template_of(rundir.run.data) if plan.job.objective == "sft" else None,
            remote=None if spec.remote is None else RemoteCheckpoints(spec.remote),
        )
        return cls(kept, spec.asynchronous)

    def save(self, engine: Engine, counters: Counters, wait: bool) -> str | None:
        """Save a checkpoint. Returns None, or the reason why it could not be written. If asynchronous and without
        ``wait``, the reason is about the previous checkpoint."""
        began = time.perf_counter()
        try:
            if not self._asynchronous:
                self._write(state_of(engine), counters, engine.is_main)
                return None
            before = self.wait()
            state = state_of(engine, copy=True)
            self._writing = _in_thread(lambda: self._write(state, counters, engine.is_main))
            return (self.wait() if wait else None) or before
        except CheckpointError as error:
            return str(error)
        finally:
            self.stalls_s.append(time.perf_counter() - began)

    def wait(self) -> str | None:
        """Wait until the thread has written its checkpoint. Returns None, or the reason why it could not."""
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is None:
            return None
        return str(error) if isinstance(error, CheckpointError) else f"writing it failed: {error!r}"

    def _write(self, state: State, counters: Counters, is_main: bool) -> None:
        self.kept.write(state, counters, is_main, self._group)
        self.finished()


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Start ``work`` in a thread. When a run fails Python does not wait for it, as it would for an executor's."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kit-checkpoint", daemon=True).start()
    return future

"""Native checkpoints written by a thread while training goes on.

Training stops while the engine copies its state to host memory. The thread's collectives have a process group of
their own, so that they and the training's never meet; a checkpoint is published as any other, complete or not at all.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kit.engines.base import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint import random_state
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.engine_checkpoint import NativeCheckpoints


class Background:
    """One write at a time. Every method is collective."""

    def __init__(self, checkpoints: NativeCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.stalls_s: list[float] = []
        """How long training stopped for each checkpoint: waiting for the one before it, and copying."""

    def start(self, engine: Engine, counters: Counters) -> None:
        """Copy the state, and write it while the caller goes on. Raises CheckpointError of the write before."""
        started = time.perf_counter()
        try:
            self.wait()
        finally:
            write = engine.snapshot()
            arguments = (write, counters, engine.is_main, random_state.capture())
            self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
            self._thread.start()
            self.stalls_s.append(time.perf_counter() - started)

    def wait(self) -> None:
        """Until what was started is published. Raises CheckpointError, on every rank, where it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, write: Any, counters: Counters, is_main: bool, random: random_state.RandomState) -> None:
        def save(directory: Path) -> None:
            write(directory, self._group)

        try:
            self._checkpoints.write(save, counters, is_main, self._group, random)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # a thread's exception would be printed and forgotten
            self._failure = CheckpointError(f"writing the checkpoint of step {counters.step} failed: {error!r}")

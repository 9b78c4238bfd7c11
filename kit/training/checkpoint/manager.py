"""Writes the native checkpoints of a run, at once or in a thread, and measures how long training waits for them.

With ``run.checkpoint.asynchronous`` training waits only until the state is copied; a thread writes the copy. The thread
has its own process group (gloo), so that its collectives do not mix with those of training.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from kit.engines.collective import run_collectively
from kit.engines.protocol import Engine
from kit.errors import CheckpointError
from kit.planner.plan import Plan
from kit.training.checkpoint import random_state
from kit.training.checkpoint.counters import Counters, RunLength
from kit.training.checkpoint.engine_checkpoint import NativeCheckpoints
from kit.training.checkpoint.exchange import exchanges
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.storage import kept
from kit.training.checkpoint.transfer import export_exchange
from kit.training.checkpoint.uploads import Uploads
from kit.training.data.chat_template import chat_template_of

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


class CheckpointManager:
    """Saves one checkpoint at a time, at once or in a thread. Every method is collective."""

    def __init__(
        self,
        native: NativeCheckpoints,
        asynchronous: bool,
        exported: Plan | None = None,
        chat_template: str | None = None,
    ) -> None:
        """``exported``: write an exchange checkpoint of this plan too, unless the engine's own fit every layout.
        ``chat_template``: of the training data, for exchange checkpoints."""
        self.native, self._asynchronous, self._exported = native, asynchronous, exported
        self.chat_template = chat_template
        self._group = dist.new_group(backend="gloo") if asynchronous and dist.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self.uploads = Uploads(None)
        """What copies each finished checkpoint to object storage."""
        self.stalls_s: list[float] = []
        """Seconds that training waited for each checkpoint: for the write; or, if asynchronous, for the previous
        checkpoint and the copy."""

    @classmethod
    def open(cls, rundir: RunDirectory, length: RunLength, elastic: bool = False) -> CheckpointManager:
        """Open the checkpoints of a run directory with its settings. ``elastic``: they must fit another number of
        nodes."""
        plan, spec = rundir.plan, rundir.run.checkpoint
        native = NativeCheckpoints(
            root=rundir.path / "checkpoints",
            plan_hash=plan.digest,
            world_size=plan.layout.world_size,
            keep_last=spec.keep_last,
            keep_every_steps=spec.keep_every_steps,
            expected_bytes=int(1e9 * plan.predicted.operation.checkpoint_gb),
            length=length,
            model=f"{plan.layout.engine} {plan.model_digest}",
            remote=None if spec.remote is None else RemoteCheckpoints(spec.remote),
        )
        template = chat_template_of(rundir.run.data) if plan.job.objective == "sft" else None
        return cls(native, spec.asynchronous, plan if elastic else None, template)

    def save(self, engine: Engine, counters: Counters, wait: bool) -> str | None:
        """Save a checkpoint. Returns None, or the reason why it could not be written. If asynchronous and without
        ``wait``, the reason is about the previous checkpoint."""
        began = time.perf_counter()
        try:
            if self._exported is not None and not engine.fits_every_layout:
                self._export(engine, counters, self._exported)
            if not self._asynchronous:
                self.native.save(engine, counters)
                self._finished(counters)
                return None
            before = self.wait()
            self._start(engine, counters)
            return (self.wait() if wait else None) or before
        except CheckpointError as error:
            return str(error)
        finally:
            self.stalls_s.append(time.perf_counter() - began)

    def _export(self, engine: Engine, counters: Counters, plan: Plan) -> None:
        """Write the exchange checkpoint of a step, before the native one, which may be of no use. Keeps as many."""
        native = self.native
        directory = native.root / f"exchange-step-{counters.step:08d}"

        def remove(paths: Iterable[Path]) -> None:
            for path in paths:
                if path.exists():
                    shutil.rmtree(path)

        run_collectively(engine.is_main, lambda: remove([directory]), f"replacing {directory}")
        template = self.chat_template
        export_exchange(engine, directory, counters, model=plan.model, lora=plan.job.lora, chat_template=template)

        def remove_old() -> None:
            there = exchanges(native.root)
            stay = kept(sorted(there, reverse=True), native.keep_last, native.keep_every_steps)
            remove(there[step] for step in there.keys() - set(stay))

        run_collectively(engine.is_main, remove_old, f"removing old checkpoints of {native.root}")
        self.uploads.add(directory.name)

    def _finished(self, counters: Counters) -> None:
        self.uploads.add(self.native.directory(counters.step).name)

    def wait(self) -> str | None:
        """Wait until the thread has written its checkpoint. Returns None, or the reason why it could not."""
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        return failure

    def _start(self, engine: Engine, counters: Counters) -> None:
        """Copy the state, and start a thread that writes the copy."""
        arguments = (engine.snapshot(), counters, engine.is_main, random_state.capture())
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def _write(self, write: Any, counters: Counters, is_main: bool, random: random_state.RandomState) -> None:
        def save(directory: Path) -> None:
            write(directory, self._group)

        try:
            self.native.write(save, counters, is_main, self._group, random)
            self._finished(counters)
        except CheckpointError as error:
            self._failure = str(error)
        except Exception as error:  # otherwise Python would only print it
            self._failure = f"writing the checkpoint of step {counters.step} failed: {error!r}"

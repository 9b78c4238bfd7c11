"""A run's copies in object storage: a thread of each rank copies what is finished, behind the run.

The threads agree on a checkpoint (by gloo, in a group of their own), the first rank of each host starts a process that
copies the host's share (``upload``), and when all have ended well the main rank copies the manifest. What is still to
copy follows from the local and the remote directories alone, so a new start goes on where a killed run stopped.

Nothing waits for the storage, except ``finish`` for a bounded time, and no failure of it ends a run.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from kit.engines.collective import Result, gather, on_all_ranks, rank
from kit.errors import CheckpointError
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.storage import MANIFEST, is_checkpoint, name_of, retained_steps, step_of, steps_in
from kit.training.logging.metrics import RunOutput
from kit.units import to_gib

LONGEST_WAIT_S = 600.0
"""At the end of a run."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
"""Pause after a failed copy. It doubles from the first to the longest."""
_GROUP_TIMEOUT = timedelta(days=7)
"""Longer than a host waits for the copy of another one."""


class Uploads(AbstractContextManager["Uploads", None]):
    """The copies of a run; no-op for runs without ``run.checkpoint.remote``. A context manager, which ends copying
    without waiting for it. Every method is collective, and so is the constructor."""

    def __init__(self, root: Path, spec: CheckpointSpec) -> None:
        """``root``: the run's ``checkpoints``."""
        self.newest_step: int | None = None
        """On the main rank: the newest step that this start has copied."""
        self._root, self._spec = root.resolve(), spec
        self._added: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """For each checkpoint True; False at the end."""
        self._reports: queue.SimpleQueue[tuple[str, int, dict[str, object], str]] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        if spec.remote is None:
            return
        self._remote = RemoteCheckpoints(spec.remote)
        self._copied: dict[str, bytes] = {}
        """Checkpoint → its manifest, in the storage."""
        self._begun: dict[str, bytes] = {}
        """Checkpoint → the manifest of the files that this start copies; what was there before is removed."""
        firsts = gather(os.environ.get("LOCAL_RANK", str(rank())) == "0")
        self._is_first, self._number, self._of = firsts[rank()], sum(firsts[: rank()]), sum(firsts)
        self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if dist.is_initialized() else None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.add()  # what an earlier start has left

    def __exit__(self, *_: object) -> None:
        self._give_up()

    def add(self) -> None:
        """A checkpoint is finished in the local directory."""
        self._added.put(True)

    def report(self, log: RunOutput) -> None:
        """Write what was copied, and what failed, to the log and the events."""
        while not self._reports.empty():
            event, step, values, words = self._reports.get()
            log.log(words)
            log.log_event(event, step, **values)

    def finish(self, log: RunOutput) -> None:
        """Wait until all is copied, at most ``LONGEST_WAIT_S``. Reports what is not."""
        if self._thread is None:
            return
        self._added.put(False)
        self._thread.join(LONGEST_WAIT_S)
        if self._thread.is_alive():
            self._failed("", f"not done {LONGEST_WAIT_S:g} s after the last step; the next start goes on copying")
            self._give_up()
            self._thread.join(_LONGEST_PAUSE_S)
        self.report(log)

    def _give_up(self) -> None:
        self._given_up.set()
        if self._process is not None:
            self._process.kill()

    def _work(self) -> None:
        """In the thread: for each call of ``add`` copy until nothing is left, the newest first. The newest checkpoint
        is what a new machine would need."""
        while self._added.get():
            name: str | None = ""
            pause_s, said = _FIRST_PAUSE_S, ""
            while name is not None:
                try:
                    name = self._on(rank() == 0, self._next)[0]
                    if name is not None:
                        self._copy(name)
                        pause_s = _FIRST_PAUSE_S
                except CheckpointError as error:
                    if str(error) != said and not self._given_up.is_set():
                        self._failed(name or "", said := str(error))
                    self._given_up.wait(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _on(self, takes_part: bool, work: Callable[[], Result]) -> list[Result]:
        return on_all_ranks(takes_part, work, f"copying to {self._remote.address}", group=self._group)

    def _next(self) -> str | None:
        """On the main rank: the newest checkpoint that is not in the storage as it is here; without one, removes old
        copies and returns None."""
        if self._given_up.is_set():
            return None
        remote, there = self._remote, self._remote.listed()
        complete = {name for name, files in there.items() if MANIFEST in files}
        local = {path.name for path in steps_in(self._root).values() if is_checkpoint(path)}
        wanted = self._retained(local | complete) & local
        for name in sorted(wanted, reverse=True):
            manifest = (self._root / name / MANIFEST).read_bytes()
            if self._copied.get(name) != manifest and remote.read(f"{name}/{MANIFEST}") != manifest:
                if self._begun.get(name) != manifest:
                    remote.remove(name)  # an earlier save of this step, or half of one
                    self._begun[name] = manifest
                return name
            self._copied[name] = manifest
        for name in there.keys() - self._retained(complete) - wanted:
            if name < max(complete):  # an incomplete one too: a newer copy replaces it
                remote.remove(name)
        return None

    def _retained(self, names: Collection[str]) -> set[str]:
        steps = sorted((step_of(name) or 0 for name in names), reverse=True)
        return set(map(name_of, retained_steps(steps, self._spec.keep_last, self._spec.keep_every_steps)))

    def _copy(self, name: str) -> None:
        """Copy the files, each host its share, then the manifest. Raises CheckpointError on every rank."""
        began = time.monotonic()
        self._on(self._is_first, partial(self._copy_share, self._root / name))
        self._on(rank() == 0, partial(self._complete, name, began))

    def _copy_share(self, directory: Path) -> None:
        share = map(str, (directory, self._remote.address, self._number, self._of))
        command = [sys.executable, "-m", "kit.training.checkpoint.upload", *share]
        # A session of its own, so that signals to the run's process group do not reach it.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as self._process:
            if self._given_up.is_set():
                self._process.kill()
            assert self._process.stdout is not None
            said = self._process.stdout.read().strip()
        if code := self._process.returncode:
            gone = not directory.is_dir()  # keep_last has removed it
            why = "it was removed before its copy was complete; newer ones follow" if gone else said
            raise CheckpointError(why or f"the upload process ended ({code})")

    def _complete(self, name: str, began: float) -> None:
        content = (self._root / name / MANIFEST).read_bytes()
        if content != self._begun[name]:
            raise CheckpointError("it was saved anew before its copy was complete")
        self._remote.write(f"{name}/{MANIFEST}", content)
        size, seconds = sum(self._remote.sizes(name).values()), round(time.monotonic() - began, 3)
        words = f"{name} is in run.checkpoint.remote: {to_gib(size):.3g} GiB in {seconds:.1f} s"
        step = step_of(name) or 0
        self.newest_step = max(step, self.newest_step or 0)
        self._reports.put(("checkpoint uploaded", step, {"bytes": size, "seconds": seconds}, words))

    def _failed(self, name: str, why: str) -> None:
        words = f"{name or 'a checkpoint'} is not in run.checkpoint.remote yet, the run goes on: {why}"
        self._reports.put(("checkpoint upload failed", step_of(name) or 0, {"why": why}, words))

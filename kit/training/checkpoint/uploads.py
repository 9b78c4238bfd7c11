"""A run's side of its copies in object storage: starts a process on each host, tells it what is finished, and reports.

A process, not a thread: encryption and checksums of terabytes would take Python's lock from the thread that launches
kernels. Nothing here waits for the storage, except ``finish`` for a bounded time, and no failure of it ends a run.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.engines.collective import gather, rank
from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.upload_process import FINISH, Upload, command
from kit.training.logging.metrics import RunOutput
from kit.units import to_gib

LONGEST_WAIT_S = 600.0
"""At the end of a run; the other ranks wait in a collective, whose timeout is at least half an hour."""


class Uploads:
    """The upload process of this rank's host, on the first rank of each host; no-op on other ranks, and for runs
    without ``run.checkpoint.remote``. A context manager, which ends the process without waiting for it."""

    def __init__(self, upload: Upload | None) -> None:
        self._upload, self._process = upload, None if upload is None else _started(upload)
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.newest_step: int | None = None
        """The newest step whose checkpoint is complete in the storage, as this process has reported it."""
        self._listen()

    @classmethod
    def open(cls, root: Path, spec: CheckpointSpec) -> Uploads:
        """Collective. ``root``: the run's ``checkpoints``."""
        if spec.remote is None:
            return cls(None)
        firsts = gather(os.environ.get("LOCAL_RANK", str(rank())) == "0")
        if not firsts[rank()]:
            return cls(None)
        number, of = sum(firsts[: rank()]), sum(firsts)
        return cls(Upload(str(root.resolve()), spec.remote, number, of, spec.keep_last, spec.keep_every_steps))

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._end(self._process)

    def add(self, name: str) -> None:
        """A checkpoint is finished in the local directory. Starts the process again if it has died."""
        if self._upload is None or self._process is None:
            return
        if (code := self._process.poll()) is not None:
            self._reports.put(
                {"event": "failed", "step": 0, "why": f"the upload process ended ({code}); a new one goes on"}
            )
            self._end(self._process)
            self._process = _started(self._upload)
            self._listen()
        self._tell(name)

    def report(self, log: RunOutput) -> None:
        """Write what the process has reported to the log and the events; on ranks without a log to standard error."""
        while not self._reports.empty():
            said = self._reports.get()
            event, step, name = said.pop("event"), said.pop("step"), said.pop("name", "")
            if event == "uploaded":
                size, seconds = to_gib(said["bytes"]), said["seconds"]
                words = f"{name} is in run.checkpoint.remote: {size:.3g} GiB in {seconds:.1f} s"
                self.newest_step = max(step, self.newest_step or 0)
            else:
                words = f"{name or 'a checkpoint'} is not in run.checkpoint.remote yet, the run goes on: {said['why']}"
            log.log(words)
            log.log_event(f"checkpoint upload {event}" if event != "uploaded" else "checkpoint uploaded", step, **said)
            if rank() and event == "failed":
                print(f"rank {rank()}: {words}", file=sys.stderr, flush=True)

    def finish(self, log: RunOutput) -> None:
        """Collective. Wait until all is copied, at most ``LONGEST_WAIT_S``. Reports what is not."""
        if self._process is not None:
            self._tell(FINISH)
            try:
                code = self._process.wait(LONGEST_WAIT_S)
                why = f"the upload process ended ({code})"
            except subprocess.TimeoutExpired:
                code, why = -1, f"not done {LONGEST_WAIT_S:g} s after the last step"
            if code:
                self._reports.put({"event": "failed", "step": 0, "why": f"{why}; the next start goes on copying"})
            self._process.kill()
            self._listener.join()
            self.report(log)
        gather(None)

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        self._listener.join()
        with suppress(BrokenPipeError), process:  # closes its pipes; what it was told after its death is lost
            pass

    def _tell(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except OSError:  # it has just died, which ``add`` will find
            pass

    def _listen(self) -> None:
        process = self._process

        def read() -> None:
            assert process is not None
            assert process.stdout is not None
            for line in process.stdout:
                self._reports.put(json.loads(line))

        self._listener = threading.Thread(target=read, daemon=True)
        if process is not None:
            self._listener.start()


def _started(upload: Upload) -> subprocess.Popen[str]:
    # A session of its own, so that signals to the run's process group do not reach it.
    return subprocess.Popen(
        command(upload), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )

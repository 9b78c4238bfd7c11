"""The process that copies finished checkpoints to object storage, one for each host of a run. Imports no torch.

``kit.training.checkpoint.uploads`` starts it. Lines on its standard input are names of finished checkpoints, and
``finish`` at the end. Lines on its standard output are reports, in JSON. It keeps no state on disk: what is still to
copy follows from the local and the remote directories, so the next start goes on where a killed process stopped.

A host copies its share of the files and writes ``uploaded-K-of-N`` with the manifest's hash. When all N are there, the
first host copies the manifest and removes what ``keep_last`` does not keep. Hosts never wait for each other.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.errors import CheckpointError
from kit.training.checkpoint.files import Files, sealed_files, verify
from kit.training.checkpoint.remote import RemoteCheckpoints, last_path, share
from kit.training.checkpoint.storage import MANIFEST, is_checkpoint, kept, name_of, step_of

FINISH = "finish"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failed attempt, and while other hosts copy. It doubles from the first to the longest."""


@dataclass(frozen=True)
class Upload:
    """What a process copies, from where to where."""

    root: str
    """Local directory of the checkpoints."""
    address: str
    number: int
    """This host's number among ``of`` hosts."""
    of: int
    keep_last: int
    every: int | None
    """As ``run.checkpoint.keep_every_steps``."""

    def kept(self, names: Collection[str]) -> set[str]:
        """The checkpoints to keep."""
        steps = sorted(map(_step, names), reverse=True)
        return set(map(name_of, kept(steps, self.keep_last, self.every)))


class Uploader:
    """Copies what is finished and not copied yet."""

    def __init__(self, upload: Upload) -> None:
        self._upload, self._root = upload, Path(upload.root)
        self._remote = RemoteCheckpoints(upload.address)
        self._copied: set[tuple[str, str, str]] = set()
        """(checkpoint, hash of its manifest, file) that this process has copied."""
        self._shared: set[tuple[str, str]] = set()
        """(checkpoint, hash of its manifest) that this host has copied, or that are complete."""
        self._said: dict[str, str] = {}
        listed = self._root.iterdir() if self._root.is_dir() else ()
        self.local = {path.name for path in listed if step_of(path.name) is not None}
        """Checkpoints that are, or were, in the local directory."""

    def attempt(self) -> bool:
        """Copy what can be copied now. Returns whether nothing is left to do."""
        upload, remote = self._upload, self._remote
        self.local = {name for name in self.local if is_checkpoint(self._root / name)}
        try:
            complete = remote.complete()
            wanted = upload.kept(self.local | complete) & self.local
            # The newest first: that is the one that a new machine would need.
            done = [self._try(name, name in complete) for name in sorted(wanted, key=_step, reverse=True)]
            if upload.number == 0:
                self._remove_old(wanted)
            return all(done)
        except CheckpointError as error:
            self._report("", "failed", why=str(error))
            return False

    def _try(self, name: str, complete: bool) -> bool:
        """Copy this host's share of one checkpoint. Returns whether this host is done with it. Reports a failure."""
        directory = self._root / name
        try:
            digest, files = sealed_files(directory / MANIFEST)
            return (name, digest) in self._shared or self._copy(name, digest, files, complete)
        except (CheckpointError, OSError, ValueError) as error:
            if not directory.is_dir():  # keep_last has removed it
                self._report(name, "failed", why="it was removed before its copy was complete; newer ones follow")
                return True
            self._report(name, "failed", why=" ".join(str(error).split()))
            return False

    def _copy(self, name: str, digest: str, files: Files, complete: bool) -> bool:
        upload, remote, directory, began = self._upload, self._remote, self._root / name, time.monotonic()
        if complete:
            there = remote.read(last_path(name))
            if there == (directory / MANIFEST).read_bytes():
                self._shared.add((name, digest))
                return True
            # The run has repeated this step, or the copy is damaged: it is no checkpoint while files change.
            remote.remove_file(last_path(name))
        mine = share(files, upload.number, upload.of)
        missing = {file: record for file, record in mine.items() if (name, digest, file) not in self._copied}
        verify(directory, missing)
        remote.put_files(directory, missing, lambda file: self._copied.add((name, digest, file)))
        if upload.number != 0:
            remote.write(f"{name}/{_mark(upload.number, upload.of)}", digest.encode())
            self._shared.add((name, digest))
            return True
        others = range(1, upload.of)
        if late := [each for each in others if remote.read(f"{name}/{_mark(each, upload.of)}") != digest.encode()]:
            self._report(name, "waits", why=f"host {late[0] + 1} of {upload.of} has not copied its files yet")
            return False
        remote.write(last_path(name), (directory / MANIFEST).read_bytes())
        self._shared.add((name, digest))
        self._report(
            name,
            "uploaded",
            bytes=sum(record.bytes for record in files.values()),
            seconds=round(time.monotonic() - began, 3),
        )
        for each in others:
            remote.remove_file(f"{name}/{_mark(each, upload.of)}")
        return True

    def _remove_old(self, wanted: set[str]) -> None:
        """Remove complete copies that need not be kept, and incomplete ones that a newer complete copy replaces."""
        complete = self._remote.complete()
        stay, newest = self._upload.kept(complete) | wanted, max(map(_step, complete), default=0)
        for name in self._remote.names() - stay:
            if _step(name) < newest:
                self._remote.remove(name)

    def _report(self, name: str, event: str, **values: Any) -> None:
        """Write a report; the same failure only once."""
        if event != "uploaded" and self._said.get(name) == (why := str(values.get("why"))):
            return
        self._said[name] = "" if event == "uploaded" else why
        print(json.dumps({"event": event, "name": name, "step": _step(name), **values}), flush=True)


def _mark(number: int, of: int) -> str:
    return f"uploaded-{number + 1}-of-{of}"


def _step(name: str) -> int:
    return step_of(name) or 0


def run_uploads() -> None:
    """Copy until ``finish`` and nothing is left; or until the run's process is gone."""
    # Signals to a whole job stop the run after a step; the last checkpoint is copied after that.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    uploader = Uploader(Upload(**json.loads(sys.argv[1])))
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            told.put(line.strip())
        os._exit(1)  # also in the middle of a copy: the next start goes on

    threading.Thread(target=listen, daemon=True).start()
    finishing, pause_s = False, _FIRST_PAUSE_S
    while True:
        done = uploader.attempt()
        if done and finishing:
            return
        pause_s = _FIRST_PAUSE_S if done else min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            word = told.get(timeout=None if done else pause_s)
        except queue.Empty:
            continue
        if word == FINISH:
            finishing = True
        else:
            uploader.local.add(word)
        pause_s = _FIRST_PAUSE_S


def command(upload: Upload) -> list[str]:
    """The command that starts the process."""
    return [sys.executable, "-m", "kit.training.checkpoint.upload_process", json.dumps(asdict(upload))]


if __name__ == "__main__":
    run_uploads()

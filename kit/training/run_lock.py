"""Lets one run use a run directory. ``run.lock`` names the process of the run's main rank; its mtime is a heartbeat.

Creates the file with O_EXCL, which works on shared file systems too. A start that finds a lock

- of the same machine (host, boot and pid namespace) takes over if that process has ended, and is refused otherwise;
- of another machine waits: it is refused at the next heartbeat, and takes over after ``STALE_S`` without a heartbeat;
- of the same rendezvous takes over at once, because torchrun has restarted its workers.

A run that finds another run's lock instead of its own ends at once, without saving.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from kit.engines.collective import on_all_ranks, rank
from kit.errors import RunDirectoryError
from kit.files import locked, write_text
from kit.training.stopping import repeatedly

NAME = "run.lock"
HEARTBEAT_S = 5.0
STALE_S = 120.0
"""Longer than a shared file system caches a file's attributes (NFS: 60 s) plus a heartbeat."""
_WATCH_S = 3 * HEARTBEAT_S
"""Time to watch a lock with an old mtime before it counts as stale: the clocks of two machines may differ."""


@dataclass(frozen=True)
class _Holder:
    """Content of ``run.lock``."""

    host: str
    machine: str
    """Boot and pid namespace. Process ids and start times can be compared only if they are equal."""
    pid: int
    process_started: str
    """Start time by the machine's clock. Distinguishes processes that had the same id."""
    since: str
    rendezvous: str
    """Name that all restarts of a run by torchrun share; empty if it may not be unique."""
    token: str

    @classmethod
    def here(cls) -> _Holder:
        return cls(
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            process_started=_started(os.getpid()) or "",
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            rendezvous=_rendezvous(),
            token=uuid.uuid4().hex,
        )

    def ended(self, other: _Holder) -> bool | None:
        """Whether the process of ``other`` has ended; None if this machine cannot know."""
        if (self.host, self.machine) != (other.host, other.machine):
            return None
        if not psutil.pid_exists(other.pid):
            return True
        started = _started(other.pid)  # a later process may have the same id
        return None if started is None else started != other.process_started


@contextmanager
def run_lock(directory: Path, take_over: bool = False) -> Iterator[None]:
    """Collective. Hold the run directory's lock, on the main rank, while entered. ``take_over``: also if another run
    holds it.

    Raises CheckpointError on every rank if another run holds the lock, or if it cannot be written."""
    lock = _Lock(directory / NAME)
    is_main = rank() == 0
    on_all_ranks(is_main, lambda: lock.acquire(take_over), f"locking {directory}")
    try:
        with repeatedly(HEARTBEAT_S, lock.beat if is_main else None, threading.Event()):
            yield
    finally:
        if is_main:
            lock.release()


class _Lock:
    def __init__(self, path: Path) -> None:
        self._path, self._mine = path, _Holder.here()
        self._taking = path.with_name(f".{path.name}.taking")
        self._text = json.dumps(asdict(self._mine)) + "\n"

    def acquire(self, take_over: bool) -> None:
        """Take the lock. Raises RunDirectoryError if another run holds it, and OSError."""
        first_seen: int | None = None
        began = time.monotonic()
        while not self._create():
            try:
                seen = self._read()
            except FileNotFoundError:  # the other run has released the lock
                continue
            (beaten, text), quiet_s = seen, time.monotonic() - began
            holder = _parse(text)
            first_seen = beaten if first_seen is None else first_seen
            if take_over or self._may_replace(holder, quiet_s, time.time() - beaten / 1e9):
                if self._replace(seen):
                    break
                continue
            if holder is not None and (self._mine.ended(holder) is False or beaten != first_seen):
                raise RunDirectoryError(
                    f"{self._path.parent} is in use: process {holder.pid} on {holder.host} has trained there since "
                    f"{holder.since}; wait for it or stop it. If it is surely gone: --take-over. Or use a new run "
                    "directory"
                )
            if quiet_s < 1:
                who = f"process {holder.pid} on {holder.host}" if holder else "a process that is just starting"
                print(f"{self._path} is of {who}: waiting up to {STALE_S:g} s for a sign of life")
            time.sleep(1)
        if take_over:  # if the other run still lives, it ends at its next heartbeat
            time.sleep(2 * HEARTBEAT_S)

    def _may_replace(self, holder: _Holder | None, quiet_s: float, age_s: float) -> bool:
        """Whether this run may replace the holder's lock. ``quiet_s``: time that this process has watched the lock.
        ``age_s``: age of the last heartbeat, if the machines' clocks agree."""
        if holder is not None:
            if holder.rendezvous and holder.rendezvous == self._mine.rendezvous:
                return True
            if (ended := self._mine.ended(holder)) is not None:
                return ended
        return quiet_s >= STALE_S or (quiet_s >= _WATCH_S and age_s >= STALE_S)

    def _create(self) -> bool:
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                file.write(self._text)
                return True
        except FileExistsError:
            return False

    def _read(self) -> tuple[int, str]:
        """The last heartbeat, and the lock's text. Raises OSError."""
        with open(self._path, encoding="utf-8") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()

    def _replace(self, seen: tuple[int, str]) -> bool:
        """Replace the lock by this run's, if it is still as ``seen``. Returns False if another run was faster.

        If several runs try, the first that gets the file lock wins. On shared file systems without file locks the last
        run wins, and the heartbeat ends the others."""
        with suppress(BlockingIOError, FileNotFoundError), locked(self._taking, wait=False):
            try:
                if self._read() != seen:
                    return False
                write_text(self._path, self._text)
                return True
            finally:
                self._taking.unlink(missing_ok=True)
        return False

    def beat(self) -> bool:
        """Update the heartbeat. Ends the process if another run has taken over. Returns True if no further heartbeat is
        needed."""
        try:
            text = self._path.read_text(encoding="utf-8")
            if text == self._text:
                os.utime(self._path)
            elif holder := _parse(text):
                directory = self._path.parent
                print(
                    f"error: process {holder.pid} on {holder.host} has taken over {directory} at {holder.since}: this "
                    "run ends without saving",
                    file=sys.stderr,
                )
                os._exit(2)
        except FileNotFoundError:
            if not (self._path.parent / "plan.yaml").exists():
                print(
                    f"error: {self._path.parent} was deleted or moved while it trains: its files are lost; stopping "
                    f"after this step, with a checkpoint in {self._path.parent / 'checkpoints'} if it can be written",
                    file=sys.stderr,
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return True
            with suppress(OSError):
                self._create()  # only the lock was removed
        except OSError:
            pass  # a shared file system may recover
        return False

    def release(self) -> None:
        """Remove the lock if it is this run's."""
        with suppress(OSError):
            if self._path.read_text(encoding="utf-8") == self._text:
                self._path.unlink()


def _parse(text: str) -> _Holder | None:
    """Parse the lock; None if the file is not written yet, or is damaged."""
    try:
        return _Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _rendezvous() -> str:
    run, endpoint = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "RDZV_ENDPOINT"))
    with suppress(ValueError):  # torchrun --standalone uses a UUID
        return str(uuid.UUID(run))
    return f"{run} {endpoint}" if run and endpoint else ""


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{uuid.getnode():x}"


def _started(pid: int) -> str | None:
    """Start time of a process; "ended" for a zombie; None if the process is not visible. On Linux the time counts from
    boot, because psutil's time of day changes with the clock."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "ended" if state in "ZX" else rest[18]
    except OSError:
        pass
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None

"""When a run ends before it is done, and by which code a scheduler knows it.

    code  meaning                                                        what to do
    0     the run is done                                                nothing
    2     an error that the user can mend; it was printed                mend it
    70    a step hung; stacks of every rank are in ``stacks/``           start again with --resume auto
    74    the run ended, and some of it was not saved; it was printed    look at what is missing
    75    stopped on request, a checkpoint was written                   start again with --resume auto

70, 74 and 75 are EX_SOFTWARE, EX_IOERR and EX_TEMPFAIL of sysexits.h. torchrun restarts on any of them but 0
(``--max-restarts``); its own exit code is 1 then, so a run that was stopped on request also leaves a file ``stopped``
in its directory.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

STOPPED_CODE = 75
UNSAVED_CODE = 74
HUNG_CODE = 70
_MARK = "stopped"
"""File in the run directory, with the reason in it, while a run waits to be started again."""


class Reason(IntEnum):
    """Why a run stops; of several ranks' reasons the largest is told."""

    NONE = 0
    TIME_LIMIT = 1
    SIGUSR1 = 2
    SIGTERM = 3

    @property
    def words(self) -> str:
        """Text for people."""
        return {0: "nothing", 1: "run.limits.max_minutes is over", 2: "SIGUSR1", 3: "SIGTERM"}[self]


class Stopping:
    """Listens for signals while it is entered. A signal only sets a flag: the step that runs is finished first."""

    def __init__(self, max_minutes: float | None, started: float | None = None) -> None:
        """``started``: ``time.monotonic()`` when the process began; now, where it is not known."""
        self._deadline = None if max_minutes is None else (started or time.monotonic()) + 60 * max_minutes
        self._signalled = Reason.NONE
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # the only one that may
            self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def mine(self) -> Reason:
        """This rank's reason to stop, before ranks agree."""
        if self._signalled is not Reason.NONE:
            return self._signalled
        return Reason.TIME_LIMIT if self._deadline is not None and time.monotonic() >= self._deadline else Reason.NONE

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signalled = max(self._signalled, Reason.SIGTERM if number == signal.SIGTERM else Reason.SIGUSR1)


def mark(rundir: Path, reason: Reason | None) -> None:
    """Leave the file that says that this run waits to be started again; None: take it away. Raises OSError."""
    path = rundir / _MARK
    if reason is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(reason.words + "\n", encoding="utf-8")


@contextmanager
def repeatedly(seconds: float, work: Callable[[], bool] | None, over: threading.Event) -> Iterator[None]:
    """While it is entered, a thread calls ``work`` every so many seconds, until it returns True. ``over`` is set at the
    end. None: nothing is called."""

    def call() -> None:
        while work is not None and not over.wait(seconds) and not work():
            pass

    thread = threading.Thread(target=call, name="kit watch", daemon=True)
    if work is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if work is not None:
            thread.join()


_GRACE_S = 5.0
"""Seconds between writing stacks and ending the process: ranks notice a hang at slightly different times."""


class Watchdog:
    """Knows what the run does and since when; ``watchdog`` makes one and looks at it."""

    def __init__(self, limit_s: float | None, directory: Path, rank: int) -> None:
        self._limit_s, self._directory, self._rank = limit_s, directory, rank
        self.beat("starting")

    def beat(self, doing: str, patience: float = 1.0) -> None:
        """The run is alive and begins something, which may take ``patience`` times the limit."""
        self._doing, self._patience, self._since = doing, patience, time.monotonic()

    @property
    def stacks(self) -> Path:
        """File for this rank's stacks."""
        return self._directory / f"rank-{self._rank:05d}.txt"

    def barks(self) -> bool:
        """Whether the run hangs; says so then, and writes the stacks of all threads."""
        waited = time.monotonic() - self._since
        if self._limit_s is None or waited < self._limit_s * self._patience:
            return False
        said = f"rank {self._rank} hangs: {self._doing} has taken {waited:.0f} s (run.limits.hang_seconds)"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(self.stacks, "w", encoding="utf-8") as file:
                file.write(said + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                os.fsync(file.fileno())
            said += f"; its stacks are in {self._directory.name}/{self.stacks.name}"
        except OSError as error:
            said += f"; its stacks could not be written: {error}"
        print(f"error: {said}; start again with --resume auto", file=sys.stderr, flush=True)
        return True


@contextmanager
def watchdog(
    limit_s: float | None,
    directory: Path,
    rank: int,
    leave: Callable[[int], object] = os._exit,
    grace_s: float = _GRACE_S,
) -> Iterator[Watchdog]:
    """Ends a process that hangs while it is entered; without a limit nothing is watched."""
    dog, over = Watchdog(limit_s, directory, rank), threading.Event()

    def look() -> bool:
        hangs = dog.barks()
        if hangs and not over.wait(grace_s):
            leave(HUNG_CODE)
        return hangs

    with repeatedly(min(1.0, (limit_s or 0.0) / 10), None if limit_s is None else look, over):
        yield dog

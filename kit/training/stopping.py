"""Ends a run early (signals, time limit, hang), and defines its exit codes for a scheduler.

    code  meaning                                                        what to do
    0     the run is done                                                nothing
    2     an error that the user can correct; it was printed             correct it
    70    a step hung; stacks of every rank are in ``stacks/``           start again with --resume auto
    74    the run ended, and some of it was not saved; it was printed    look at what is missing
    75    stopped on request, a checkpoint was written                   start again with --resume auto
    130   stopped by Ctrl-C; it says whether a checkpoint was written    start again with --resume auto

70, 74 and 75 are EX_SOFTWARE, EX_IOERR and EX_TEMPFAIL of sysexits.h; 130 is a shell's for SIGINT. torchrun restarts
its workers on any code but 0 (``--max-restarts``). Its own exit code is 1 for most of them, so a run that stops on
request also writes a file ``stopped`` into its directory.
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
from typing import Any, NoReturn

from kit.files import write_text

STOPPED_CODE = 75
INTERRUPTED_CODE = 130
UNSAVED_CODE = 74
HUNG_CODE = 70
_MARK = "stopped"
"""File in the run directory that contains the reason, while a stopped run waits for its next start."""


class Reason(IntEnum):
    """Why a run stops. If ranks have several reasons, the largest is reported."""

    NONE = 0
    TIME_LIMIT = 1
    SIGUSR1 = 2
    SIGTERM = 3
    SIGINT = 4

    @property
    def words(self) -> str:
        """The reason in words."""
        return ("nothing", "run.limits.max_minutes is over", "SIGUSR1", "SIGTERM", "Ctrl-C")[self]


_SIGNALS = {signal.SIGUSR1: Reason.SIGUSR1, signal.SIGTERM: Reason.SIGTERM, signal.SIGINT: Reason.SIGINT}
SAME_CTRL_C_S = 0.5
"""A terminal and a launcher may both deliver one Ctrl-C; a person is slower."""


class Stopping:
    """Handles SIGTERM, SIGUSR1 and SIGINT while entered. A signal only sets a flag, so the current step is finished
    first. A second Ctrl-C ends the process at once."""

    def __init__(self, max_minutes: float | None, started: float | None = None) -> None:
        """``started``: ``time.monotonic()`` when the process began; None: now."""
        self._deadline = None if max_minutes is None else (started or time.monotonic()) + 60 * max_minutes
        self._signalled = Reason.NONE
        self._interrupted: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # others may not
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a shell's, for jobs in the background
            wanted = [number for number in _SIGNALS if not (ignored and number == signal.SIGINT)]
            self._before = {number: signal.signal(number, self._heard) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def mine(self) -> Reason:
        """This rank's own reason to stop. Ranks agree on one reason later."""
        if self._signalled is not Reason.NONE:
            return self._signalled
        return Reason.TIME_LIMIT if self._deadline is not None and time.monotonic() >= self._deadline else Reason.NONE

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signalled = max(self._signalled, _SIGNALS[signal.Signals(number)])
        if number != signal.SIGINT:
            return
        if self._interrupted is None:
            self._interrupted = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # Not print: the signal may have come in the middle of one.
                os.write(2, b"\nCtrl-C: finishing this step, then a checkpoint; Ctrl-C again ends at once, without\n")
        elif time.monotonic() - self._interrupted > SAME_CTRL_C_S:
            leave_at_once()


def leave_at_once() -> NoReturn:
    """End this process as Ctrl-C does, saving nothing; gives a terminal its cursor back, which the live line hides."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")
    os._exit(INTERRUPTED_CODE)


def mark(rundir: Path, reason: Reason | None) -> None:
    """Write the file ``stopped`` with the reason; None: remove the file. Raises OSError."""
    path = rundir / _MARK
    if reason is None:
        path.unlink(missing_ok=True)
    else:
        write_text(path, reason.words + "\n")


@contextmanager
def repeatedly(seconds: float, work: Callable[[], bool] | None, over: threading.Event) -> Iterator[None]:
    """While entered, a thread calls ``work`` every ``seconds`` seconds until it returns True; None: no thread. Sets
    ``over`` at the end."""

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
"""Seconds between writing stacks and ending the process: other ranks may notice a hang a little later."""


class Watchdog:
    """Records the current activity of the run and its start time. ``watchdog`` creates and checks it."""

    def __init__(self, limit_s: float | None, directory: Path, rank: int) -> None:
        self._limit_s, self._directory, self._rank = limit_s, directory, rank
        self.beat("starting")

    def beat(self, doing: str, patience: float = 1.0) -> None:
        """Record that the run begins an activity, which may take ``patience`` times the limit."""
        self._doing, self._patience, self._since = doing, patience, time.monotonic()

    @property
    def stacks(self) -> Path:
        """File for this rank's stacks."""
        return self._directory / f"rank-{self._rank:05d}.txt"

    def barks(self) -> bool:
        """Whether the run hangs. If so, prints an error and writes the stacks of all threads."""
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
        print(f"error: {said}; start again with --resume auto", file=sys.stderr)
        return True


@contextmanager
def watchdog(
    limit_s: float | None,
    directory: Path,
    rank: int,
    leave: Callable[[int], object] = os._exit,
    grace_s: float = _GRACE_S,
) -> Iterator[Watchdog]:
    """While entered, ends the process if it hangs; None for ``limit_s``: never. ``leave`` gets the exit code."""
    dog, over = Watchdog(limit_s, directory, rank), threading.Event()

    def look() -> bool:
        hangs = dog.barks()
        if hangs and not over.wait(grace_s):
            leave(HUNG_CODE)
        return hangs

    with repeatedly(min(1.0, (limit_s or 0.0) / 10), None if limit_s is None else look, over):
        yield dog

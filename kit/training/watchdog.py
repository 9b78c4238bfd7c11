"""A step that never ends is ended: every rank writes where it stands, then leaves so that a launcher can restart it.

A collective in which one rank is missing blocks the others inside C++ code, where no signal handler of Python's runs. A
thread still does: waiting in a collective releases the interpreter. Stacks are written by faulthandler. A rank waits a
little between writing and leaving, since the first to leave breaks the collectives in which the others stand.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kit.training.stopping import HUNG_CODE

_GRACE_S = 5.0
"""Seconds between writing stacks and ending the process: ranks notice a hang at slightly different times."""


class Watchdog:
    """Runs while it is entered; without a limit it does nothing."""

    def __init__(
        self,
        limit_s: float | None,
        directory: Path,
        rank: int,
        leave: Callable[[int], object] = os._exit,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._limit_s, self._directory, self._rank, self._leave, self._grace_s = (
            limit_s,
            directory,
            rank,
            leave,
            grace_s,
        )
        self._doing, self._patience, self._since = "starting", 1.0, time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._limit_s is not None:
            self.beat(self._doing)
            self._thread = threading.Thread(target=self._watch, name="kit watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self, doing: str, patience: float = 1.0) -> None:
        """The run is alive and begins something, which may take ``patience`` times the limit."""
        self._doing, self._patience, self._since = doing, patience, time.monotonic()

    @property
    def stacks(self) -> Path:
        """File for this rank's stacks."""
        return self._directory / f"rank-{self._rank:05d}.txt"

    def _watch(self) -> None:
        assert self._limit_s is not None
        while not self._over.wait(max(0.05, self._left_s())):
            if self._left_s() <= 0:
                self._break()
                return

    def _left_s(self) -> float:
        assert self._limit_s is not None
        return self._since + self._limit_s * self._patience - time.monotonic()

    def _break(self) -> None:
        waited = time.monotonic() - self._since
        said = f"rank {self._rank} hangs: {self._doing} has taken {waited:.0f} s (run.limits.hang_seconds)"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(self.stacks, "w", encoding="utf-8") as file:
                file.write(said + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()
                os.fsync(file.fileno())
            said += f"; its stacks are in {self._directory.name}/{self.stacks.name}"
        except OSError as error:
            said += f"; its stacks could not be written: {error}"
        print(f"error: {said}; start again with --resume auto", file=sys.stderr, flush=True)
        if not self._over.wait(self._grace_s):
            self._leave(HUNG_CODE)

"""Ends a rank whose launcher is gone: nobody would stop it, and a resumed run would write beside it.

A killed torchrun (which ``accelerate launch`` runs in its own process) or DeepSpeed launcher leaves its ranks behind.
Every rank therefore looks at its line of launchers: its parent, the parent's parent, as long as these are launchers
(DeepSpeed has two, the runner and ``launch.py``). Whoever started the launcher, a shell that is logged out or a job
script, may go. A thread compares parents, not ``prctl(PR_SET_PDEATHSIG)``: that signal comes when the *thread* that
started the rank ends, knows only the direct parent, and exists on Linux alone.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile

import psutil

from kit.errors import EngineError
from kit.training.stopping import HUNG_CODE, repeatedly

_NAMES = re.compile(
    r"(.*/)?(torchrun|accelerate|deepspeed|mpirun|mpiexec|orted|prted|prterun|launch(_elastic|_hosts)?\.sh)"
    r"|torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.(runner|launch)"
)
"""One of the first arguments of a launcher's command."""
_FIRST_ARGUMENTS = 5
_LOOK_S = 0.5
_GRACE_S = 300.0
"""A rank that is still there so long after its launcher waits for peers that are gone; it ends as it is."""


@contextmanager
def ends_with_launcher() -> Iterator[None]:
    """While it is entered, a rank that loses its launcher gets SIGTERM: inside the loop it finishes the step and saves,
    before the loop it ends at once. A rank without a launcher is left alone. Raises EngineError where the launcher is
    gone already."""
    launchers = _launchers()

    def look() -> bool:
        if (lost := _lost(launchers)) is None:
            return False
        _say(f"the launcher (process {lost}) is gone: rank {os.environ.get('RANK', '0')} stops")
        os.kill(os.getpid(), signal.SIGTERM)
        if not over.wait(_GRACE_S):
            _say(f"rank {os.environ.get('RANK', '0')} has not stopped within {_GRACE_S:g} s and ends without saving")
            os._exit(HUNG_CODE)
        return True

    over = threading.Event()
    with repeatedly(_LOOK_S, look if launchers else None, over):
        yield


def _launchers() -> list[psutil.Process]:
    """The nearest first. torchrun says by its environment that there is one, whatever its name (a notebook)."""
    parents: list[psutil.Process] = psutil.Process().parents()
    found = list(takewhile(_is_launcher, parents))
    if found or "TORCHELASTIC_RUN_ID" not in os.environ or not parents:
        return found
    if "python" not in (program := _program(parents[0])):
        raise EngineError(
            f"the launcher ended before this rank began (the parent is {program}); start the run again with --resume "
            "auto"
        )
    return parents[:1]


def _is_launcher(process: psutil.Process) -> bool:
    try:
        return any(_NAMES.fullmatch(word) for word in process.cmdline()[:_FIRST_ARGUMENTS])
    except psutil.Error:
        return False


def _program(process: psutil.Process) -> str:
    for name in (process.exe, lambda: process.cmdline()[0], process.name):
        try:
            return str(name())
        except (psutil.Error, IndexError):  # of another user
            continue
    return "unknown"


def _lost(launchers: list[psutil.Process]) -> int | None:
    """The first that is gone: a process whose parent has ended gets another one, so process ids are not mixed up."""
    parent = os.getppid()
    for launcher in launchers:
        if launcher.pid != parent:
            return int(launcher.pid)
        try:
            parent = launcher.ppid()
        except psutil.Error:
            return int(launcher.pid)
    return None


def _say(text: str) -> None:
    """To standard error, which may have been a pipe to the launcher."""
    with suppress(OSError):
        print(f"error: {text}", file=sys.stderr, flush=True)

"""Ends a rank whose launcher is gone: nothing else would stop it, and a resumed run would write to the same files.

A killed torchrun (which ``accelerate launch`` runs in its own process) or DeepSpeed launcher leaves its ranks running.
So every rank watches its launchers: its parent, the parent's parent, and so on, as long as these are launchers.
DeepSpeed has two, the runner and ``launch.py``. A shell or job script that started the launcher may end.

A thread compares parents. ``prctl(PR_SET_PDEATHSIG)`` would not do: it signals when the *thread* that started the rank
ends, it covers the direct parent only, and it exists on Linux only.
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
"""Matches one of the first ``_FIRST_ARGUMENTS`` arguments of a launcher's command."""
_FIRST_ARGUMENTS = 5
_LOOK_S = 0.5
_GRACE_S = 300.0
"""A rank that runs this long after its launcher ended probably waits for dead ranks, so it ends without saving."""


@contextmanager
def ends_with_launcher() -> Iterator[None]:
    """While entered, this process gets SIGTERM when its launcher ends. Inside the loop the rank then finishes the step
    and saves; before the loop it ends at once. Does nothing without a launcher. Raises EngineError if the launcher has
    ended already."""
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
    """This process's launchers, its parent first. If torchrun's environment variables are set, the parent counts as a
    launcher whatever its name, for example a notebook."""
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
        except (psutil.Error, IndexError):  # a process of another user
            continue
    return "unknown"


def _lost(launchers: list[psutil.Process]) -> int | None:
    """Process id of the first launcher that has ended, or None. Compares parents' ids: a process whose parent ends gets
    another parent, so a reused process id does not matter."""
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
    """Print to standard error, which may be a closed pipe to the launcher."""
    with suppress(OSError):
        print(f"error: {text}", file=sys.stderr)

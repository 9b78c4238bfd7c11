"""Ctrl-C for runs under torchrun: ``python -m kit.training.interruptible -m torch.distributed.run ARGUMENTS`` is
``python -m torch.distributed.run ARGUMENTS``, or ``accelerate launch``, which calls it, but for how it ends.

Ctrl-C on a terminal reaches torchrun and not its ranks, which are in sessions of their own. torchrun would hand it on,
kill after 30 s every rank that has not finished its step and its checkpoint, and end with a traceback and code 1. Here
the ranks get all the time they need, a second Ctrl-C kills them, and a run that was stopped ends with its ranks' code.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from types import FrameType

from kit.training.stopping import INTERRUPTED_CODE, SAME_CTRL_C_S, STOPPED_CODE, leave_at_once


def launch() -> int:
    """Run the launcher that ``sys.argv`` names. Returns the exit code."""
    import psutil
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    first: list[float] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        # torchrun makes each rank the leader of a session.
        children = [child.pid for child in psutil.Process().children()]
        ranks = [pid for pid in children if os.getsid(pid) == pid]
        if first and time.monotonic() - first[0] > SAME_CTRL_C_S:
            for pid in ranks:
                os.killpg(pid, signal.SIGKILL)
            leave_at_once()
        if not first:
            first.append(time.monotonic())
            for pid in ranks:
                os.kill(pid, signal.SIGINT)
            for pid in ranks:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # torchrun itself collects it
            raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.SIGINT)

    # torchrun's default without SIGINT, which it would handle itself (torch/distributed/run.py, 2.13).
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP,SIGQUIT")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    sys.argv = sys.argv[2:]
    try:
        importlib.import_module(sys.argv[0]).main()
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in (STOPPED_CODE, INTERRUPTED_CODE):
            raise
        return code
    return 0


if __name__ == "__main__":
    try:
        sys.exit(launch())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)

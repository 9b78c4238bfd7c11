"""A command on a real terminal."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from functools import partial

from tests.support import ROOT


class OnTerminal:
    """A command as the foreground process of a terminal of its own."""

    def __init__(self, *command: str, columns: int = 80, **variables: str) -> None:
        self._keyboard, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        own = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        environment = own | {"TERM": "xterm", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **variables}
        # login_tty makes it the controlling terminal of a new session.
        self.process = subprocess.Popen(command, preexec_fn=partial(_at, terminal), env=environment)
        os.close(terminal)
        self._said = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while some := os.read(self._keyboard, 1 << 16):
                self._said += some
        except OSError:  # the last process has closed the terminal
            pass

    def press_ctrl_c(self) -> None:
        """The terminal then tells its foreground processes."""
        os.write(self._keyboard, b"\x03")

    def end(self, limit_s: float = 120) -> tuple[int, str]:
        """(exit code, all that was printed, moves of the cursor too)."""
        code = self.process.wait(limit_s)
        self._reader.join(5)
        os.close(self._keyboard)
        return code, self._said.decode().replace("\r", "")


def without_moves(said: str) -> str:
    """What was printed, as lines without colours and moves of the cursor."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", said)


def _at(terminal: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test may itself run in the background
    os.login_tty(terminal)

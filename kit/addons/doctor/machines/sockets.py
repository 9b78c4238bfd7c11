"""Listens on a port and connects to it on other hosts: ``python sockets.py PORT SECONDS HOST…``.

It prints ``listening``, waits for a line, which comes when every host listens, and prints what ``reached`` says of each
host. It listens on until its input ends, as it does when ssh goes, and no longer than so many seconds.

Run as a file, not as a module: it imports nothing of kit, and many start at once.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading

CONNECT_S = 3.0


def reached(host: str, port: int) -> str | None:
    """Why a host cannot be reached; None where it can."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def accept(server: socket.socket) -> None:
    """Accepts connections for ever."""
    while True:
        server.accept()[0].close()


def main(port: int, seconds: int, targets: list[str]) -> None:
    """Print ``listening``, and then the JSON of host → why it cannot be reached."""
    signal.alarm(seconds)
    with contextlib.suppress(OSError):  # of a port that is taken the other hosts tell
        threading.Thread(target=accept, args=(socket.create_server(("", port)),), daemon=True).start()
    print("listening", flush=True)
    sys.stdin.readline()
    print(json.dumps({host: reached(host, port) for host in targets}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

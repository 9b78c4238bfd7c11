"""A listener, and connections: ``python sockets.py listen PORT SECONDS`` or ``connect PORT SECONDS HOST…``.

Run as a file, not as a module: it imports nothing of kit, and many start at once.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time


def listen(port: int, seconds: float) -> None:
    """Accept connections for so long, or until standard input ends, as it does when ssh goes; says ``listening``."""
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([server, sys.stdin], [], [], left)
            if sys.stdin in ready:
                return
            if server in ready:
                server.accept()[0].close()


def connect(targets: list[str], port: int, seconds: float) -> dict[str, str | None]:
    """Host → why it cannot be reached; None where it can."""
    found: dict[str, str | None] = {}
    for host in targets:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
            found[host] = None
        except OSError as error:
            found[host] = error.strerror or str(error)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(int(sys.argv[2]), float(sys.argv[3]))
    else:
        print(json.dumps(connect(sys.argv[4:], int(sys.argv[2]), float(sys.argv[3]))))

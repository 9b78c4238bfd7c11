"""Serves the page on this machine alone: other Host and Origin headers are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kit.addons.ui.state import offer
from kit.errors import SpecError

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")


class LocalOnly:
    """ASGI middleware: 403 for a Host or an Origin that is not this server's, which another site's page would send."""

    def __init__(self, app: Any, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}".encode() for name in _NAMES}
        self.origins = {b"http://" + host for host in self.hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or self._is_local(scope["headers"]):
            await self.app(scope, receive, send)
        else:
            from starlette.responses import PlainTextResponse
            from starlette.websockets import WebSocketClose

            # A socket is closed before it is accepted: 403.
            text = PlainTextResponse("kit ui answers this machine alone\n", 403)
            await (WebSocketClose(1008) if scope["type"] == "websocket" else text)(scope, receive, send)

    def _is_local(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [(name, value.lower()) for name, value in headers]
        hosts = [value for name, value in given if name == b"host"]
        origins = [value for name, value in given if name == b"origin"]
        return len(hosts) == 1 and hosts[0] in self.hosts and self.origins.issuperset(origins)


def serve(files: Iterable[Path], port: int, open_browser: bool) -> None:
    """Serve until Ctrl-C. Raises ``SpecError`` for files that cannot be read and a port in use."""
    offered = offer(files)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ADDRESS, port))
    except OSError as error:
        raise SpecError(f"port {port} of {ADDRESS} cannot be used: {error.strerror}; choose another --port") from None
    os.environ["NICEGUI_STORAGE_PATH"] = os.devnull  # NiceGUI keeps nothing, and reads no .nicegui here
    from nicegui import app, ui

    from kit.addons.ui.page import build

    build(offered)
    app.add_middleware(LocalOnly, port=port)
    app.on_startup(lambda: print(f"kit ui: http://{ADDRESS}:{port}   Ctrl-C ends it", flush=True))
    ui.run(
        host=ADDRESS,
        port=port,
        title="kit",
        dark=None,
        reconnect_timeout=60,
        reload=False,
        show=open_browser,
        show_welcome_message=False,
    )

"""A small Hugging Face hub on the loopback address: repositories are directories, and an answer can be made to fail.

It answers what huggingface_hub and datasets ask (their paths and headers: huggingface_hub/hf_api.py, file_download.py,
utils/_http.py). A program meets it by the variables of ``environment``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs)(?:/[^/]+)?(?:/(.*))?)?")


@dataclass
class Hub:
    """A running hub, what it has, and what it was asked."""

    models: dict[str, Path] = field(default_factory=dict)
    data_sets: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Ids that are given only to whoever sends ``token``."""
    token: str = ""
    cut: set[str] = field(default_factory=set)
    """Names of files that end in the middle."""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    tokens: set[str] = field(default_factory=set)
    """Tokens that were sent."""
    address: str = ""

    def environment(self, home: Path, **changes: str) -> dict[str, str]:
        """Variables of a program that uses this hub, with its cache and login below ``home``."""
        own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
        telemetry = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return own | telemetry | {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "no_proxy": "127.0.0.1"} | changes

    def fetched(self) -> list[str]:
        """Names of the files that were sent."""
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path]


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """While entered, ``hub`` answers at its ``address``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # of the base class
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if token := self.headers.get("Authorization", "").removeprefix("Bearer "):
            self.hub.tokens.add(token)
        file, api = _FILE.fullmatch(path), _API.fullmatch(path)
        if file is None and api is None:
            return self._send(404)
        name = file[2] if file else api[2] if api else ""
        of_sets = bool(file and file[1]) or bool(api and api[1] == "datasets")
        root = (self.hub.data_sets if of_sets else self.hub.models).get(name)
        if root is None:
            return self._send(401 if not token else 404, code="RepoNotFound")
        if name in self.hub.gated and token != self.hub.token:
            return self._send(403 if token else 401, code="GatedRepo")
        if file:
            return self._file(root / file[3])
        assert api is not None
        entries = [_entry(root, each) for each in sorted(root.rglob("*"))]
        inside = api[4] or ""
        if api[3] == "tree":
            found: Any = [each for each in entries if each["path"].startswith(f"{inside}/" if inside else "")]
        elif api[3] == "paths-info":
            wanted = json.loads(body)["paths"]
            found = [each for each in entries if each["path"] in wanted]
        else:
            siblings = [{"rfilename": each["path"]} for each in entries if each["type"] == "file"]
            found = {"id": name, "sha": REVISION, "siblings": siblings, "private": False, "gated": False, "tags": []}
        return self._send(200, json.dumps(found).encode())

    do_HEAD = do_GET = do_POST = _answer

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._send(404, code="EntryNotFound")
        content = path.read_bytes()
        etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "none"}
        return self._send(200, content, cut=path.name in self.hub.cut, **etag)

    def _send(self, status: int, content: bytes = b"{}", code: str = "", cut: bool = False, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, **({"X-Error-Code": code} if code else {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = self.close_connection or cut


def _entry(root: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {
        "type": "file",
        "path": name,
        "size": path.stat().st_size,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
    }

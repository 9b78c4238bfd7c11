"""moto's S3 server on this machine, which a test can make fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

SECRET = "a-secret-of-the-environment"


class Server:
    """``fault``: (method, key) → a status with which the server answers instead of S3, or None. It may wait, too."""

    def __init__(self) -> None:
        self.fault: Callable[[str, str], int | None] = lambda method, key: None
        self._app = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status = self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if status is None:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        start_response(f"{status} planted", [("Content-Length", "0")])
        return [b""]


@contextmanager
def s3_server(bucket: str) -> Iterator[Server]:
    """A server with an empty bucket; the environment has its address and credentials, also for child processes."""
    server = Server()
    s3fs.S3FileSystem.clear_instance_cache()  # which know the address of an earlier server
    with make_server("127.0.0.1", 0, server, threaded=True) as http, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{http.server_port}", "AWS_ACCESS_KEY_ID": "a-key-of-the-environment",
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=bucket)
        try:
            yield server
        finally:
            server.fault = lambda method, key: None
            for each in client.list_objects_v2(Bucket=bucket).get("Contents", []):
                client.delete_object(Bucket=bucket, Key=each["Key"])
            client.delete_bucket(Bucket=bucket)
            http.shutdown()

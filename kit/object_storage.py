"""Files at addresses such as ``s3://bucket/prefix``, by fsspec.

Credentials come from the environment alone, as the library of each protocol reads them (``AWS_ACCESS_KEY_ID``,
``AWS_PROFILE``, a role of the machine, ``GOOGLE_APPLICATION_CREDENTIALS``). kit neither takes nor writes them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from kit.errors import KitError, SpecError
from kit.extras import install

T = TypeVar("T")

INSTALL = f"{install('storage')} (s3), or fsspec and the package of that protocol"
UNKNOWN_VERSION = "of unknown version"


def check_address(name: str, address: str) -> None:
    """Raises SpecError where ``address`` has no protocol, or holds credentials. ``name``: its key in messages."""
    from urllib.parse import urlsplit  # a plan without an address does not need it

    try:
        parts = urlsplit(address)
        secret = parts.password is not None or "=" in parts.query
    except ValueError:
        raise SpecError(f"{name} is no address; use s3://bucket/prefix or file:///directory") from None
    if secret:  # the message must not repeat it
        raise SpecError(
            f"{name} holds credentials, which kit would write into files; leave them out and set them in the "
            f"environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not (parts.scheme and "://" in address and (parts.netloc or parts.path.strip("/"))):
        raise SpecError(f"{name}={address} has no protocol; use s3://bucket/prefix or file:///directory")


def open_filesystem(name: str, address: str) -> tuple[Any, str]:
    """(fsspec's file system, path in it) of an address. Opens no connection.

    Raises SpecError if the protocol is unknown, or if its package is not installed."""
    check_address(name, address)
    # fsspec makes no directories of a local file system by itself; object stores have none.
    options = {"auto_mkdir": True} if address.startswith(("file:", "local:")) else {}
    try:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(address, **options)
    except (ImportError, ValueError) as error:
        words = " ".join(str(error).split())
        raise SpecError(f"{name}={address} cannot be opened ({words}); use: {INSTALL}") from None
    return filesystem, str(path).rstrip("/")


def is_address(path: str) -> bool:
    """Whether a path is an address, and not on a disk of this machine."""
    return "://" in path


_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated")
"""What file systems of fsspec say of an object's version."""
_MERGED_BYTES = 8 << 20
"""Ranges that touch are one request up to this size."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address."""

    num_bytes: int
    version: str
    """Differs after a change of the content, where the storage says so: ETag, or the time of the last change."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> RemoteFile:
        """From what fsspec says of a file."""
        version = next((f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key)), UNKNOWN_VERSION)
        return cls(int(info["size"]), version)


@dataclass(frozen=True)
class RemoteFiles:
    """Files below an address; their names may have several parts. Every method raises ``error`` if the storage cannot
    be used."""

    address: str
    key: str
    """The key of the address, for messages."""
    error: type[KitError]
    pauses_s: tuple[float, ...] = ()
    """Pauses before further tries to read. A missing file and missing rights are errors at once."""

    @cached_property
    def opened(self) -> tuple[Any, str]:
        """(fsspec's file system, path in it)."""
        return open_filesystem(self.key, self.address)

    def find(self, file: str) -> RemoteFile | None:
        """Size and version of a file, asked anew; None if it is missing."""
        filesystem, root = self.opened

        def info() -> Any:
            filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                return filesystem.info(f"{root}/{file}")

        found = self._tried(f"reading {file} of", info)
        return RemoteFile.of(found) if found and found["type"] == "file" else None

    def read(self, file: str) -> bytes | None:
        """Content of a small file; None if it is missing."""
        filesystem, root = self.opened

        def content() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(filesystem.cat_file(f"{root}/{file}"))
            return None

        return self._tried(f"reading {file} of", content)

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from start to stop of every range, asked for all at once. Only what failed is tried again."""
        from fsspec.utils import merge_offset_ranges

        filesystem, root = self.opened
        path, firsts, lasts = f"{root}/{file}", [start for start, _ in ranges], [stop for _, stop in ranges]
        _, starts, stops = merge_offset_ranges([path] * len(ranges), firsts, lasts, max_block=_MERGED_BYTES)
        parts: dict[int, bytes] = {}

        def fetch() -> None:
            missing = [number for number in range(len(starts)) if number not in parts]
            begins, ends = [starts[number] for number in missing], [stops[number] for number in missing]
            found = filesystem.cat_ranges([path] * len(missing), begins, ends, on_error="return")
            failed = None
            for number, part in zip(missing, found, strict=True):
                if isinstance(part, BaseException):
                    failed = part
                elif len(part) != stops[number] - starts[number]:
                    failed = OSError(f"{len(part)} bytes instead of {stops[number] - starts[number]}")
                else:
                    parts[number] = part
            if failed is not None:
                raise failed

        self._tried(f"reading {file} of", fetch)
        places = [(bisect_right(starts, start) - 1, start, stop) for start, stop in ranges]
        return [parts[number][start - starts[number] : stop - starts[number]] for number, start, stop in places]

    def write(self, file: str, content: bytes) -> None:
        """Write a small file."""
        filesystem, root = self.opened
        with self.storage_errors("writing"):
            filesystem.pipe_file(f"{root}/{file}", content)

    def check_writable(self) -> None:
        """Write an empty file ``kit``, to find a wrong bucket or missing rights before hours of work."""
        self.write("kit", b"")

    def get(self, file: str, path: Path) -> None:
        """Copy a file to a local path."""
        filesystem, root = self.opened
        self._tried(f"downloading {file} from", lambda: filesystem.get_file(f"{root}/{file}", str(path)))

    def remove_file(self, file: str) -> None:
        """Remove a file if it is there."""
        filesystem, root = self.opened
        with self.storage_errors("removing a file of"), suppress(FileNotFoundError):
            filesystem.rm_file(f"{root}/{file}")

    def _tried(self, doing: str, call: Callable[[], T]) -> T:
        for pause_s in self.pauses_s:
            try:
                return call()
            except (FileNotFoundError, PermissionError, KitError):
                break
            except Exception:  # every protocol has its own
                time.sleep(pause_s)
        with self.storage_errors(doing):
            return call()

    @contextmanager
    def storage_errors(self, doing: str) -> Iterator[None]:
        """Libraries of storage raise exceptions of their own kinds."""
        try:
            yield
        except KitError:
            raise
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise self.error(
                f"{doing} {self.address} failed: {words}; check the address, the credentials in the environment, and "
                f"the network"
            ) from error


def files_beside(
    key: str, address: str, error: type[KitError], pauses_s: tuple[float, ...] = ()
) -> tuple[RemoteFiles, str]:
    """(files of the directory, last part of the address) of an address that is a prefix or a file. Raises SpecError."""
    check_address(key, address)
    directory, _, name = address.rstrip("/").rpartition("/")
    if directory.endswith("/"):  # s3://bucket
        raise SpecError(f"{key}={address} names no file in it; use s3://bucket/prefix or file:///directory/prefix")
    return RemoteFiles(directory, key, error, pauses_s), name

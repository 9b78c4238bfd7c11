"""Copies of a run's checkpoints in object storage, by fsspec. Imports no torch.

    s3://bucket/prefix/step-00000020/state/…          the files of the local directory, under the same names
    s3://bucket/prefix/step-00000020/uploaded-1-of-2  host 1 of two has copied its share; removed when all have
    s3://bucket/prefix/step-00000020/manifest.json    copied last: a directory without it is no checkpoint
    s3://bucket/prefix/exchange-step-00000060/        the same, with exchange.json as the last file

The manifest has the hash of every file, so a reader finds a file that is truncated, or of another upload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.cached import cached
from kit.errors import CheckpointError, KitError
from kit.object_storage import open_filesystem
from kit.training.checkpoint.files import FileRecord
from kit.training.checkpoint.storage import kept

LAST_FILE = {"step": "manifest.json", "exchange-step": "exchange.json"}
"""Kind of checkpoint → the file with the hashes of all others, which is copied last."""
_NAME = re.compile(r"(step|exchange-step)-(\d{8})")
_AT_ONCE = 2
"""Files that are copied at the same time. s3fs holds up to ten parts of 50 MB of each in memory."""


def kind_and_step(name: str) -> tuple[str, int] | None:
    """("step" or "exchange-step", step) of the name of a checkpoint's directory; None for other names."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def last_file(name: str) -> str:
    """Name of the file that completes a checkpoint."""
    return LAST_FILE[name.rpartition("-")[0]]


def kept_names(names: Collection[str], last: Mapping[str, int | None], every: int | None) -> set[str]:
    """The checkpoints to keep. ``last``: how many newest of each kind; None: all of them. ``every``: as
    ``run.checkpoint.keep_every_steps``."""
    stay: set[str] = set()
    for kind, number in last.items():
        steps = {found[1]: name for name in names if (found := kind_and_step(name)) and found[0] == kind}
        newest_first = sorted(steps, reverse=True)
        stay |= {steps[step] for step in kept(newest_first, len(steps) if number is None else number, every)}
    return stay


def share(files: Mapping[str, FileRecord], number: int, of: int) -> dict[str, FileRecord]:
    """The files that host ``number`` of ``of`` copies. Every host gets about as many bytes."""
    loads = [0] * of
    mine = {}
    for name, record in sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])):
        host = loads.index(min(loads))
        loads[host] += record.bytes + 1
        if host == number:
            mine[name] = record
    return mine


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The checkpoints below an address. Every method raises CheckpointError if the storage cannot be used."""

    address: str

    @cached
    def _opened(self) -> tuple[Any, str]:
        return open_filesystem("run.checkpoint.remote", self.address)

    def names(self) -> set[str]:
        """Names of all checkpoints, complete or not."""
        filesystem, root = self._opened
        with self._described("listing"):
            filesystem.invalidate_cache()
            try:
                listed = filesystem.ls(root, detail=False)
            except FileNotFoundError:  # nothing was written yet
                return set()
        return {name for path in listed if kind_and_step(name := str(path).rstrip("/").rpartition("/")[2])}

    def complete(self) -> set[str]:
        """Names of the checkpoints with their last file."""
        return {name for name in self.names() if self.has(name, last_file(name))}

    def steps(self, kind: str = "step") -> list[int]:
        """Steps of the complete checkpoints of a kind, newest first."""
        found = (kind_and_step(name) for name in self.complete())
        return sorted((each[1] for each in found if each and each[0] == kind), reverse=True)

    def check_writable(self) -> None:
        """Write an empty file ``kit``, to find a wrong bucket or missing rights before hours of training."""
        filesystem, root = self._opened
        with self._described("writing"):
            filesystem.pipe_file(f"{root}/kit", b"")

    def has(self, name: str, file: str) -> bool:
        """Whether a checkpoint has a file."""
        filesystem, root = self._opened
        with self._described("reading"):
            filesystem.invalidate_cache()
            return bool(filesystem.exists(f"{root}/{name}/{file}"))

    def read(self, name: str, file: str) -> bytes | None:
        """Content of a small file; None if it is missing."""
        filesystem, root = self._opened
        with self._described("reading"), suppress(FileNotFoundError):
            return bytes(filesystem.cat_file(f"{root}/{name}/{file}"))
        return None

    def write(self, name: str, file: str, content: bytes) -> None:
        """Write a small file."""
        filesystem, root = self._opened
        with self._described("writing"):
            filesystem.pipe_file(f"{root}/{name}/{file}", content)

    def put(self, directory: Path, files: Mapping[str, FileRecord], done: Callable[[str], None]) -> None:
        """Copy files of a local checkpoint; compares the size of every copy. Calls ``done`` with each finished one."""
        filesystem, root = self._opened

        def one(name: str, record: FileRecord) -> None:
            copy = f"{root}/{directory.name}/{name}"
            with self._described(f"uploading {directory.name}/{name} to"):
                filesystem.put_file(str(directory / name), copy)
                filesystem.invalidate_cache()
                size = filesystem.info(copy)["size"]
            if size != record.bytes:
                raise CheckpointError(f"{copy} has {size} bytes after its upload, not {record.bytes}; trying again")
            done(name)

        _several(one, files)

    def get(self, name: str, files: Mapping[str, FileRecord | None], directory: Path) -> None:
        """Copy files of a checkpoint into a local directory. Does not check their hashes."""
        filesystem, root = self._opened

        def one(file: str, _: object) -> None:
            path = directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._described(f"downloading {name}/{file} from"):
                filesystem.get_file(f"{root}/{name}/{file}", str(path))

        _several(one, files)

    def remove(self, name: str, only_last: bool = False) -> None:
        """Remove a checkpoint, its last file first: what a kill leaves is no checkpoint. ``only_last``: that file."""
        filesystem, root = self._opened
        with self._described("removing old checkpoints of"):
            with suppress(FileNotFoundError):
                filesystem.rm_file(f"{root}/{name}/{last_file(name)}")
            if not only_last:
                with suppress(FileNotFoundError):
                    filesystem.rm(f"{root}/{name}", recursive=True)

    def remove_file(self, name: str, file: str) -> None:
        """Remove one file if it is there."""
        filesystem, root = self._opened
        with self._described("removing a file of"), suppress(FileNotFoundError):
            filesystem.rm_file(f"{root}/{name}/{file}")

    @contextmanager
    def _described(self, doing: str) -> Iterator[None]:
        """Libraries of storage raise exceptions of their own kinds."""
        try:
            yield
        except KitError:
            raise
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(
                f"{doing} {self.address} failed: {words}; check the address, the credentials in the environment, and "
                f"the network"
            ) from error


def _several(one: Callable[[str, Any], None], files: Mapping[str, Any]) -> None:
    """Call ``one`` on all files, a few at a time. Raises the first error, and starts no further file."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(one, name, value) for name, value in files.items()]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

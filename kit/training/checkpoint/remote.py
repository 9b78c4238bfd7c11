"""Copies of a run's checkpoints in object storage, by fsspec. Imports no torch.

    s3://bucket/prefix/step-00000020/model/…          the files of the local directory, under the same names
    s3://bucket/prefix/step-00000020/uploaded-1-of-2  host 1 of two has copied its share; removed when all have
    s3://bucket/prefix/step-00000020/manifest.json    copied last: a directory without it is no checkpoint

The manifest has the hash of every file, so a reader finds a file that is truncated, or of another upload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import CheckpointError, KitError
from kit.object_storage import RemoteFiles
from kit.training.checkpoint.files import FileRecord
from kit.training.checkpoint.storage import MANIFEST, step_of

_AT_ONCE = 2
"""Files that are copied at the same time. s3fs holds up to ten parts of 50 MB of each in memory."""


def last_path(name: str) -> str:
    """Path of a checkpoint's manifest, below the address."""
    return f"{name}/{MANIFEST}"


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
class RemoteCheckpoints(RemoteFiles):
    """The checkpoints below an address. Every method raises CheckpointError if the storage cannot be used."""

    key: str = "run.checkpoint.remote"
    error: type[KitError] = CheckpointError

    def names(self) -> set[str]:
        """Names of all checkpoints, complete or not."""
        filesystem, root = self.opened
        with self.described("listing"):
            filesystem.invalidate_cache()
            try:
                listed = filesystem.ls(root, detail=False)
            except FileNotFoundError:  # nothing was written yet
                return set()
        return {name for path in listed if step_of(name := str(path).rstrip("/").rpartition("/")[2]) is not None}

    def complete(self) -> set[str]:
        """Names of the checkpoints with their last file."""
        return {name for name in self.names() if self.find(last_path(name))}

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        return sorted((step for name in self.complete() if (step := step_of(name)) is not None), reverse=True)

    def put_files(self, directory: Path, files: Mapping[str, FileRecord], done: Callable[[str], None]) -> None:
        """Copy files of a local checkpoint. Calls ``done`` with each finished one."""

        def one(name: str, record: FileRecord) -> None:
            self.put(directory / name, f"{directory.name}/{name}", record.bytes)
            done(name)

        _several(one, files)

    def get_files(self, name: str, files: Mapping[str, FileRecord | None], directory: Path) -> None:
        """Copy files of a checkpoint into a local directory. Does not check their hashes."""

        def one(file: str, _: object) -> None:
            path = directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self.get(f"{name}/{file}", path)

        _several(one, files)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its last file first: what a kill leaves is no checkpoint."""
        self.remove_file(last_path(name))
        filesystem, root = self.opened
        with self.described("removing old checkpoints of"), suppress(FileNotFoundError):
            filesystem.rm(f"{root}/{name}", recursive=True)


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

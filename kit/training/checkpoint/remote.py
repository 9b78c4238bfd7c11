"""Copies of a run's checkpoints in object storage, by fsspec. Imports no torch.

    s3://bucket/prefix/step-00000020/state/…          the files of the local directory, under the same names
    s3://bucket/prefix/step-00000020/uploaded-1-of-2  host 1 of two has copied its share; removed when all have
    s3://bucket/prefix/step-00000020/manifest.json    copied last: a directory without it is no checkpoint
    s3://bucket/prefix/exchange-step-00000060/        the same, with exchange.json as the last file

The manifest has the hash of every file, so a reader finds a file that is truncated, or of another upload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import CheckpointError, KitError
from kit.object_storage import RemoteFiles
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


def last_path(name: str) -> str:
    """Path of the last file, below the address."""
    return f"{name}/{last_file(name)}"


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
        return {name for path in listed if kind_and_step(name := str(path).rstrip("/").rpartition("/")[2])}

    def complete(self) -> set[str]:
        """Names of the checkpoints with their last file."""
        return {name for name in self.names() if self.find(last_path(name))}

    def steps(self, kind: str = "step") -> list[int]:
        """Steps of the complete checkpoints of a kind, newest first."""
        found = (kind_and_step(name) for name in self.complete())
        return sorted((each[1] for each in found if each and each[0] == kind), reverse=True)

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

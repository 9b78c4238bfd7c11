"""Copies of a run's checkpoints in object storage, by fsspec. Imports no torch.

    s3://bucket/prefix/step-00000020/model/…        the files of the local directory, under the same names
    s3://bucket/prefix/step-00000020/manifest.json  copied last: a directory without it is no checkpoint

The manifest has the hash of every file, so a reader finds a file that is truncated, or of another upload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import CheckpointError, KitError
from kit.object_storage import RemoteFiles
from kit.training.checkpoint.files import FileRecord, verify
from kit.training.checkpoint.storage import MANIFEST, step_of

_AT_ONCE = 2
"""Files that are copied at the same time. s3fs holds up to ten parts of 50 MB of each in memory."""


@dataclass(frozen=True)
class RemoteCheckpoints(RemoteFiles):
    """The checkpoints below an address. Every method raises CheckpointError if the storage cannot be used."""

    key: str = "run.checkpoint.remote"
    error: type[KitError] = CheckpointError

    def listed(self, name: str = "") -> dict[str, dict[str, int]]:
        """Checkpoint → file → its bytes, of what is there, complete or not. ``name``: of this checkpoint alone."""
        filesystem, root = self.opened
        found: dict[str, dict[str, int]] = {}
        with self.storage_errors("listing"):
            filesystem.invalidate_cache()
            for path, info in filesystem.find(f"{root}/{name}".rstrip("/"), detail=True).items():
                step, _, file = str(path).removeprefix(f"{root}/").partition("/")
                if step_of(step) is not None:
                    found.setdefault(step, {})[file] = info["size"]
        return found

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        return sorted((step_of(name) or 0 for name, files in self.listed().items() if MANIFEST in files), reverse=True)

    def sizes(self, name: str) -> dict[str, int]:
        """File of a checkpoint → its bytes, of what is there."""
        return self.listed(name).get(name, {})

    def put_files(self, directory: Path, files: Mapping[str, FileRecord]) -> None:
        """Copy the files of a local checkpoint that are not there with their size. Raises CheckpointError for one that
        differs from its record, here or there."""
        filesystem, root = self.opened
        there = self.sizes(directory.name)
        missing = {file: record for file, record in files.items() if there.get(file) != record.bytes}
        verify(directory, missing)
        with self.storage_errors("copying to"):
            copies = [f"{root}/{directory.name}/{file}" for file in missing]
            filesystem.put([str(directory / file) for file in missing], copies, **_at_once(filesystem))
        there = self.sizes(directory.name)
        for file, record in missing.items():
            if there.get(file) != record.bytes:
                size = f"{there[file]} bytes" if file in there else "no file"
                raise CheckpointError(
                    f"{self.address}/{directory.name}/{file} has {size} after its upload, not {record.bytes} bytes; "
                    "try again"
                )

    def get_files(self, name: str, files: Collection[str], directory: Path) -> None:
        """Copy files of a checkpoint into a local directory. Does not check their hashes."""
        filesystem, root = self.opened
        with self.storage_errors(f"downloading {name} from"):
            copies = [str(directory / file) for file in files]
            filesystem.get([f"{root}/{name}/{file}" for file in files], copies, **_at_once(filesystem))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its last file first: what a kill leaves is no checkpoint."""
        self.remove_file(f"{name}/{MANIFEST}")
        filesystem, root = self.opened
        with self.storage_errors("removing old checkpoints of"), suppress(FileNotFoundError):
            filesystem.rm(f"{root}/{name}", recursive=True)


def _at_once(filesystem: Any) -> dict[str, int]:
    return {"batch_size": _AT_ONCE} if filesystem.async_impl else {}

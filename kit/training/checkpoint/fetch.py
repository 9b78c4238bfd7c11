"""Copies a checkpoint from object storage into the run directory, complete and with the right hashes or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from kit.engines.collective import on_all_ranks, split_over_ranks
from kit.errors import CheckpointError
from kit.files import partial_name, publish
from kit.training.checkpoint.files import Files, checked_files, refuse_existing, verify
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.storage import MANIFEST, require_disk_space


def fetch(remote: RemoteCheckpoints, name: str, root: Path, is_main: bool) -> Path:
    """Collective. Copy the checkpoint ``name`` to ``root``, each rank its share of the files; returns its directory.

    Raises CheckpointError on every rank, and leaves nothing, if a file is missing or differs from the manifest."""
    directory = root / name
    partial, doing = partial_name(directory), f"reading {remote.address}/{name}"

    def start() -> Files:
        refuse_existing(directory)
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
        partial.mkdir(parents=True)
        remote.get_files(name, [MANIFEST], partial)
        files = checked_files(partial / MANIFEST, f"{remote.address}/{name}")
        require_disk_space(root, sum(record.bytes for record in files.values()))
        return files

    try:
        files = on_all_ranks(is_main, start, doing)[0]
        mine = dict(split_over_ranks(sorted(files.items())))

        def copy() -> None:
            remote.get_files(name, mine, partial)
            verify(partial, mine)

        on_all_ranks(True, copy, doing)
        on_all_ranks(is_main, lambda: publish(partial, directory), doing)
    except CheckpointError:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory

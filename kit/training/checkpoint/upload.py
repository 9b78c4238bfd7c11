"""The process that copies one host's share of one checkpoint to object storage. Imports no torch.

    python -m kit.training.checkpoint.upload DIRECTORY ADDRESS NUMBER OF

``uploads`` starts it, and copies the manifest when every host's process has ended well. It prints why it failed. A
process, not a thread: encryption and checksums of terabytes would take Python's lock from the thread that launches
kernels.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from kit.errors import CheckpointError
from kit.training.checkpoint.files import FileRecord, Files, checked_files
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.storage import MANIFEST


def share(files: Files, number: int, of: int) -> dict[str, FileRecord]:
    """The files that host ``number`` of ``of`` copies. Hosts differ by the bytes of the largest file at most."""
    return dict(sorted(files.items(), key=lambda each: -each[1].bytes)[number::of])


def upload(directory: Path, address: str, number: int, of: int) -> None:
    """Copy the share of host ``number`` of ``of``. Raises CheckpointError, also if a file differs from the manifest."""
    files = checked_files(directory / MANIFEST, directory)
    RemoteCheckpoints(address).put_files(directory, share(files, number, of))


def _follow() -> None:
    """End when the run's process does: the next start copies anew what this one would still write."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    # Signals to a whole job stop the run after a step; its last checkpoint is copied after that.
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    try:
        upload(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    except CheckpointError as failure:
        print(failure)  # not to standard error, where libraries warn
        sys.exit(1)

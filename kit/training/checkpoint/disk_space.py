"""Whether a checkpoint fits onto its disk, asked before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from kit.errors import CheckpointError
from kit.units import to_gib


def require_disk_space(directory: Path, needed_bytes: int) -> None:
    """Raises CheckpointError where the file system of ``directory`` (or of its nearest parent) has less left."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise CheckpointError(
            f"a checkpoint takes {_words(needed_bytes)} and {existing} has {_words(free)} left; free some space, or "
            f"keep fewer (run.checkpoint.keep_last)"
        )


def _words(num_bytes: int) -> str:
    gib = to_gib(num_bytes)
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes} bytes"

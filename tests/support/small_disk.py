"""A small disk, to be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[None]:
    """A tmpfs mounted at the new directory ``path``. Raises OSError where that is not allowed: only root may."""
    path.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        raise PermissionError(f"tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)

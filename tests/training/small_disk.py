"""A file system of a few hundred kilobytes, for root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """A tmpfs mounted at the new directory ``path``; the test is skipped where that is not allowed."""
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a full disk; only root can mount a small tmpfs (RLIMIT_FSIZE stands in elsewhere)")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: a full disk; tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)

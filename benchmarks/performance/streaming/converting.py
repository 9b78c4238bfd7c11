"""One conversion, in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path

import kit.addons.importers.megatron.offline  # noqa: F401 - modules are no part of what is measured
from kit.training.checkpoint.convert import convert
from tests.support.peak_memory import Peak, return_freed_memory


def converted(source: Path, to: str, out: Path, model: Path | None) -> tuple[float, int]:
    """(seconds, the most host memory that it needed at a time, in bytes). ``model``: for a source without it."""
    return_freed_memory()
    with Peak() as peak:
        started = time.perf_counter()
        convert(source, to, out, dtype="float32", model=None if model is None else str(model))
        seconds = time.perf_counter() - started
    return seconds, peak.grown

"""Peak of a process's own memory during a piece of work: anonymous and shared pages, not files that are mapped."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

PERIOD_S = 0.001


def return_freed_memory() -> None:
    """Freed blocks go back to the system at once: a heap that only grows would be measured instead of tensors."""
    ctypes.CDLL(None).mallopt(-1, 0)  # M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD


def own_bytes() -> int:
    """What the kernel would have to swap out: RssAnon and RssShmem. Pages of mapped files can be dropped."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(value.split()[0]) * 1024 for value in fields.values())


class Peak:
    """``with Peak() as peak: …``; then ``peak.grown`` is the largest growth, ``peak.kept`` what is left of it."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._before = self._most = own_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        gc.collect()
        self.grown = self._most - self._before
        self.kept = own_bytes() - self._before

    def _watch(self) -> None:
        while not self._done.wait(PERIOD_S):
            self._most = max(self._most, own_bytes())

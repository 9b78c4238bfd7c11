"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def comes_true(condition: Callable[[], object], limit_s: float) -> bool:
    """Whether it does within the limit. Returns as soon as it has."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)

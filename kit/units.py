"""Units: names carry them (``peak_gib``, ``link_gbytes_per_s``), this file converts and prints them."""

from __future__ import annotations

GIB = 1024**3
"""Bytes in one GiB."""
GB = 10**9
"""Bytes in one GB (links and disks are sold in these)."""
TFLOP = 10**12
"""Floating-point operations in one TFLOP."""
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86400


def to_gib(num_bytes: float) -> float:
    """Bytes → GiB."""
    return num_bytes / GIB


def human_count(count: float) -> str:
    """A count with three significant digits and the field's suffix: ``8.03B``, ``500M``, ``1.2T``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.3g}"


def human_seconds(seconds: float) -> str:
    """A duration in the largest unit that keeps it readable: ``420 ms``, ``3.2 s``, ``5.1 h``, ``12.3 days``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 2 * SECONDS_PER_HOUR:
        return f"{seconds / 60:.3g} min"
    if seconds < 2 * SECONDS_PER_DAY:
        return f"{seconds / SECONDS_PER_HOUR:.3g} h"
    return f"{seconds / SECONDS_PER_DAY:.3g} days"

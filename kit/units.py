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
        if abs(count) >= _ROUNDS_UP * limit:
            return f"{_digits(count / limit)}{suffix}"
    return _digits(count)


def human_seconds(seconds: float, like: float | None = None) -> str:
    """A duration in the largest unit that keeps it readable: ``420 ms``, ``3.2 s``, ``5.1 h``, ``12.3 days``.

    ``like``: in the unit of that duration, so that the two can be compared at a glance.
    """
    size = seconds if like is None else like
    if size < _ROUNDS_UP:
        return f"{_digits(seconds * 1e3)} ms"
    if size < 120:
        return f"{_digits(seconds)} s"
    if size < 2 * SECONDS_PER_HOUR:
        return f"{_digits(seconds / 60)} min"
    if size < 2 * SECONDS_PER_DAY:
        return f"{_digits(seconds / SECONDS_PER_HOUR)} h"
    return f"{_digits(seconds / SECONDS_PER_DAY)} days"


_ROUNDS_UP = 0.9995
"""A value above this part of the next unit rounds to 1 of that unit at three digits."""


def _digits(value: float) -> str:
    """Three significant digits, never as a power of ten: ``2,110`` and not ``2.11e+03``."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{value:.3g}"

"""GPUs as nvidia-smi reports them: memory, health, clocks; plain values, which hosts send as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.specs.local import nvidia_smi

_LIMIT_S = 10


def _number(text: str) -> float | None:
    """Number in a field; None where the driver lacks the field: "[N/A]", "[Not Supported]"."""
    try:
        return float(text)
    except ValueError:
        return None


def _is(word: str) -> Callable[[str], bool]:
    return lambda text: text == word


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "index": ("index", int),
    "name": ("name", str),
    "driver": ("driver_version", str),
    "memory_total_mib": ("memory.total", _number),
    "memory_used_mib": ("memory.used", _number),
    "uncorrected_ecc_errors": ("ecc.errors.uncorrected.volatile.total", _number),
    "sm_mhz": ("clocks.current.sm", _number),
    "max_sm_mhz": ("clocks.max.sm", _number),
    "slowed_by_power": ("clocks_throttle_reasons.hw_slowdown", _is("Active")),
    "slowed_by_heat": ("clocks_throttle_reasons.hw_thermal_slowdown", _is("Active")),
    "temperature_c": ("temperature.gpu", _number),
    "retired_pages_pending": ("retired_pages.pending", _is("Yes")),
    "persistence": ("persistence_mode", _is("Enabled")),
    # The clock that somebody has set (nvidia-smi -ac), and the one that the GPU was made with.
    "set_mhz": ("clocks.applications.graphics", _number),
    "default_mhz": ("clocks.default_applications.graphics", _number),
    "power_limit_w": ("power.limit", _number),
    "default_power_limit_w": ("power.default_limit", _number),
}
"""Our name → the field of ``nvidia-smi --help-query-gpu``, and how its text is read."""


def query() -> str | None:
    """Output of nvidia-smi; None where there is none. Raises OSError, or TimeoutExpired where a sick driver hangs."""
    fields = ",".join(field for field, _ in _FIELDS.values())
    return nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", limit_s=_LIMIT_S)


def parse(text: str) -> list[dict[str, Any]]:
    """Rows of ``query``, by the names of ``_FIELDS``."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [{name: read(cell) for (name, (_, read)), cell in zip(_FIELDS.items(), row, strict=True)} for row in rows]

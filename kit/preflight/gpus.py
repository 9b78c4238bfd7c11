"""GPUs as nvidia-smi reports them: memory, health, clocks."""

from __future__ import annotations

from dataclasses import dataclass

from kit.specs.local import nvidia_smi

FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "clocks.current.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "temperature.gpu",
    "retired_pages.pending",
    "persistence_mode",
    "clocks.applications.graphics",
    "clocks.default_applications.graphics",
    "power.limit",
    "power.default_limit",
)
"""``nvidia-smi --help-query-gpu``; a driver that lacks one answers "[N/A]" or "[Not Supported]"."""
LIMIT_S = 10


@dataclass(frozen=True)
class Gpu:
    """One row. Numbers that the driver does not tell are None."""

    index: int
    name: str
    driver: str
    memory_total_mib: float | None
    memory_used_mib: float | None
    uncorrected_ecc_errors: float | None
    sm_mhz: float | None
    max_sm_mhz: float | None
    slowed_by_hardware: bool
    temperature_c: float | None
    retired_pages_pending: bool
    persistence: bool
    set_mhz: float | None
    """Clock that somebody has set (nvidia-smi -ac), and below it the one that it was made with."""
    default_mhz: float | None
    power_limit_w: float | None
    default_power_limit_w: float | None


def query() -> str | None:
    """Output of nvidia-smi; None where there is none. Raises OSError, or TimeoutExpired where a sick driver hangs."""
    return nvidia_smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", limit_s=LIMIT_S)


def parse(text: str) -> tuple[Gpu, ...]:
    """Rows of ``query``."""
    return tuple(_gpu([cell.strip() for cell in line.split(",")]) for line in text.splitlines() if line.strip())


def _gpu(cells: list[str]) -> Gpu:
    value = dict(zip(FIELDS, cells, strict=True))
    return Gpu(
        index=int(value["index"]),
        name=value["name"],
        driver=value["driver_version"],
        memory_total_mib=_number(value["memory.total"]),
        memory_used_mib=_number(value["memory.used"]),
        uncorrected_ecc_errors=_number(value["ecc.errors.uncorrected.volatile.total"]),
        sm_mhz=_number(value["clocks.current.sm"]),
        max_sm_mhz=_number(value["clocks.max.sm"]),
        slowed_by_hardware="Active" in (value[FIELDS[8]], value[FIELDS[9]]),
        temperature_c=_number(value["temperature.gpu"]),
        retired_pages_pending=value["retired_pages.pending"] == "Yes",
        persistence=value["persistence_mode"] == "Enabled",
        set_mhz=_number(value["clocks.applications.graphics"]),
        default_mhz=_number(value["clocks.default_applications.graphics"]),
        power_limit_w=_number(value["power.limit"]),
        default_power_limit_w=_number(value["power.default_limit"]),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

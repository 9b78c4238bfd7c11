"""Rows that an earlier kit predicted and today's leaves out: the field that cannot be read, and the last error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.accuracy import memory, throughput


def lost_rows(results: Iterable[memory.Result | throughput.Result], snapshot: dict[str, Any]) -> tuple[int, list[str]]:
    """How many figures ``snapshot`` (of ``benchmarks.snapshot --data``) predicted, and a line for each that is left out
    now."""
    earlier = {name: values for rows in snapshot["accuracy"].values() for name, values in rows.items()}
    predicted, lines = 0, []
    for result in results:
        values = earlier.get(result.row["id"], {})
        if isinstance(result, memory.Result):
            last, measured = values.get(result.statistic, {}).get("peak"), result.measured_gib
        else:
            last, measured = values.get("step"), result.measured_s or 0.0
        predicted += last is not None
        if last is not None and result.skipped:
            error = f"{last / measured - 1:+.1%}" if measured else "unknown"
            lines.append(f"{result.row['id']}: {result.skipped}; its last error: {error}")
    return predicted, lines

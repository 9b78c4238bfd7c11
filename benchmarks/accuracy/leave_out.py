"""Constants fitted to rows, and the errors when each source is predicted with constants fitted without its rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.accuracy.memory import RESERVED_OVER_ALLOCATED, Result
from benchmarks.accuracy.programs.torch_layer import QUANTISED_INPUT_BYTES, linear_inputs
from benchmarks.accuracy.rows import workload_of
from benchmarks.accuracy.strata import Errors, errors_by, grouped, own_errors
from kit.units import GIB


def counted_peaks(results: Iterable[Result]) -> list[Result]:
    """Predicted peaks that enter error figures."""
    return [
        result
        for result in results
        if result.excluded is None and result.predicted_gib is not None and result.statistic != "allocated"
    ]


def reserved_factors(results: Iterable[Result]) -> dict[str, float]:
    """Group → reserved / allocated memory, fitted to all other groups: the median of their medians, at least 1."""
    reserved = [result for result in counted_peaks(results) if result.statistic == "max_reserved"]
    ratios = grouped((result.row["group"], result.measured_gib / _allocated(result)) for result in reserved)
    return _without_own({group: [statistics.median(values)] for group, values in ratios.items()})


def quantised_widths(results: Iterable[Result]) -> dict[str, float]:
    """Group → bytes that a 4-bit layer saves per element of its input, fitted to all other groups."""
    parts = [(result, *_split(result)) for result in counted_peaks(results) if _four_bit(result)]
    return _without_own(
        grouped((result.row["group"], (result.measured_gib - rest) / each) for result, each, rest in parts)
    )


def without_own_rows(results: Iterable[Result]) -> list[Result]:
    """Peaks with every fitted constant taken from other groups only."""
    results = list(results)
    factors, widths = reserved_factors(results), quantised_widths(results)
    changed = []
    for result in counted_peaks(results):
        predicted = result.predicted_gib
        if result.statistic == "max_reserved":
            predicted = factors.get(result.row["group"], RESERVED_OVER_ALLOCATED) * _allocated(result)
        elif _four_bit(result):
            per_byte, rest = _split(result)
            predicted = rest + widths.get(result.row["group"], QUANTISED_INPUT_BYTES) * per_byte
        changed.append(replace(result, predicted_gib=predicted))
    return changed


def errors_without(results: Iterable[Result]) -> dict[str, Errors]:
    """Errors of headlines with constants of other groups, and of the rows that use a constant."""
    held_out = without_own_rows(results)
    chosen = {
        "peak above 4 GiB": [result for result in held_out if result.measured_gib > 4],
        "peak above 4 GiB, reserved": [result for result in held_out if result.statistic == "max_reserved"],
        "peak above 4 GiB, QLoRA": [result for result in held_out if _four_bit(result)],
    }
    return errors_by({name: own_errors(rows) for name, rows in chosen.items()})


def _without_own(values: dict[str, list[float]]) -> dict[str, float]:
    others = {group: [each for name, own in values.items() if name != group for each in own] for group in values}
    return {group: statistics.median(rest) for group, rest in others.items() if rest}


def _allocated(result: Result) -> float:
    return sum(size for name, size in result.components_gib.items() if name != "fragmentation")


def _four_bit(result: Result) -> bool:
    return result.row["job"]["engine"] == "litgpt" and "nf4" in str(result.row["job"].get("lora"))


def _split(result: Result) -> tuple[float, float]:
    """(GiB per byte of the constant, GiB of all other memory)."""
    workload = workload_of(result.row)
    per_byte = linear_inputs(workload) * workload.tokens * workload.model.num_layers / GIB
    return per_byte, (result.predicted_gib or 0.0) - QUANTISED_INPUT_BYTES * per_byte

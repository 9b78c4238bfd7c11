"""Constants that were estimated from rows, and the error when each source is predicted without its own rows."""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.accuracy import memory
from benchmarks.accuracy.memory import Result
from benchmarks.accuracy.strata import Errors, errors_of
from kit.units import GIB


def reserved_without(results: list[Result]) -> tuple[float, Errors | None]:
    """(lowest estimate's distance from the highest, errors of reserved rows when their group is left out).

    The factor is the median over groups of measured over predicted, before fragmentation.
    """
    rows = [result for result in results if result.statistic == "max_reserved" and _counts(result)]
    ratios: dict[str, list[float]] = {}
    for result in rows:
        bare = sum(size for name, size in result.components_gib.items() if name != "fragmentation")
        ratios.setdefault(result.row["group"], []).append(result.measured_gib / bare)
    pairs, factors = [], []
    for group, own in ratios.items():
        others = [statistics.median(values) for name, values in ratios.items() if name != group]
        if not others:
            continue
        factor = max(statistics.median(others), 1.0)
        factors.append(factor)
        pairs += [(group, factor / ratio - 1) for ratio in own]
    spread = max(factors) - min(factors) if factors else 0.0
    return spread, errors_of(pairs)


def quantised_without(results: list[Result]) -> tuple[float, Errors | None]:
    """The same for the bytes that a 4-bit layer keeps of its input: each model's from the other models' rows."""
    rows = [result for result in results if _counts(result) and result.row["job"]["engine"] == "litgpt" and _four_bit(result)]
    wanted: dict[str, list[tuple[float, float, Result]]] = {}
    for result in rows:
        per_byte, rest = _split(result)
        wanted.setdefault(result.row["group"], []).append((per_byte, rest, result))
    pairs, found = [], []
    for group, own in wanted.items():
        others = [
            (result.measured_gib - rest) / per_byte
            for name, rows_of in wanted.items()
            if name != group
            for per_byte, rest, result in rows_of
        ]
        if not others:
            continue
        width = statistics.median(others)
        found.append(width)
        pairs += [(group, (rest + width * per_byte) / result.measured_gib - 1) for per_byte, rest, result in own]
    return (max(found) - min(found) if found else 0.0), errors_of(pairs)


def _split(result: Result) -> tuple[float, float]:
    """(GiB for each byte of the constant, GiB of everything else)."""
    from benchmarks.accuracy.rows import setup_of
    from kit.cost.torch_layer import _linear_inputs

    setup = setup_of(result.row)
    per_byte = _linear_inputs(setup) * setup.tokens * setup.shape.num_layers / GIB
    from kit.cost.torch_layer import QUANTISED_INPUT_BYTES

    return per_byte, (result.predicted_gib or 0.0) - QUANTISED_INPUT_BYTES * per_byte


def _four_bit(result: Result) -> bool:
    return "nf4" in str(result.row["job"].get("lora"))


def _counts(result: Result) -> bool:
    return result.excluded is None and result.predicted_gib is not None


def headline_without(results: list[Result]) -> Errors | None:
    """Peaks above 4 GiB with every estimated constant taken from other sources' rows only."""
    reserved = _factors(results)
    replaced = []
    for result in results:
        if not _counts(result) or result.statistic == "allocated" or result.measured_gib <= 4:
            continue
        changed = result
        if result.statistic == "max_reserved":
            factor = reserved.get(result.row["group"], memory.RESERVED_OVER_ALLOCATED)
            bare = sum(size for name, size in result.components_gib.items() if name != "fragmentation")
            changed = replace(result, predicted_gib=factor * bare)
        elif result.row["job"]["engine"] == "litgpt" and _four_bit(result):
            per_byte, rest = _split(result)
            changed = replace(result, predicted_gib=rest + _widths(results)[result.row["group"]] * per_byte)
        replaced.append(changed)
    return errors_of((result.row["group"], result.relative_error or 0.0) for result in replaced)


def _factors(results: list[Result]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {}
    for result in results:
        if result.statistic == "max_reserved" and _counts(result):
            bare = sum(size for name, size in result.components_gib.items() if name != "fragmentation")
            ratios.setdefault(result.row["group"], []).append(result.measured_gib / bare)
    return {
        group: max(statistics.median(statistics.median(v) for name, v in ratios.items() if name != group), 1.0)
        for group in ratios
        if len(ratios) > 1
    }


def _widths(results: list[Result]) -> dict[str, float]:
    rows = [result for result in results if _counts(result) and result.row["job"]["engine"] == "litgpt" and _four_bit(result)]
    values = [(result.row["group"], result.measured_gib, *_split(result)) for result in rows]
    return {
        group: statistics.median((measured - rest) / unit for name, measured, unit, rest in values if name != group)
        for group in {name for name, *_ in values}
    }

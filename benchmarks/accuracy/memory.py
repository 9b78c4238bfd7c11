"""Predicts the memory of each row, for the row's statistic and rank."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy.pipelines import NotPredictedError, Row
from benchmarks.accuracy.programs.memory import memory_of
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.rows import excluded, workload_of
from kit.units import to_gib

RESERVED_OVER_ALLOCATED = 1.06
"""Reserved over allocated memory at the peak. Fitted to rows: the median over groups of FSDP runs (leave-one-source-out
in docs/accuracy.md)."""


@dataclass(frozen=True)
class Result:
    """One row, predicted or left out."""

    row: Row
    statistic: str
    """max_allocated, max_reserved or allocated (end of step)."""
    measured_gib: float
    predicted_gib: float | None
    components_gib: dict[str, float]
    excluded: str | None
    """Why the row does not enter error figures."""
    skipped: str | None
    """Why it could not be predicted."""

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.predicted_gib is None else self.predicted_gib / self.measured_gib - 1


def results_of(row: Row) -> list[Result]:
    """The row's peak, and for Megatron's the memory allocated when a step has ended, where measured."""
    found = {name: row["measured"].get(f"{name}_gib") for name in ("max_allocated", "max_reserved", "allocated")}
    if found["max_allocated"]:
        del found["max_reserved"]
    return [_result(row, statistic, gib) for statistic, gib in found.items() if gib]


def _result(row: Row, statistic: str, measured_gib: float) -> Result:
    why = excluded(row)
    try:
        workload = workload_of(row)
        components = predict(row, workload, statistic)
    except NotPredictedError as error:
        return Result(row, statistic, measured_gib, None, {}, why, str(error))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, LookupError, AssertionError) as error:
        # A row that does not fit the schema is reported and does not stop the program.
        return Result(row, statistic, measured_gib, None, {}, why, f"not understood: {error!r}")
    return Result(row, statistic, measured_gib, sum(components.values()), components, why, None)


def predict(row: Row, workload: PublishedWorkload, statistic: str) -> dict[str, float]:
    """GiB by component on the row's rank; on the fullest rank if the row states the largest or no rank."""
    moment = "first_step_peak" if row["measured"].get("steps_recorded") == 1 else "peak"
    moment = "end_of_step" if statistic == "allocated" else moment
    parts_of_stages = [getattr(memory_of(workload, stage), moment) for stage in _stages(row, workload)]
    fullest = max(parts_of_stages, key=lambda parts: sum(parts.values()))
    components = {name: to_gib(size) for name, size in fullest.items()}
    if statistic == "max_reserved":
        components["fragmentation"] = (RESERVED_OVER_ALLOCATED - 1) * sum(components.values())
    return components


def _stages(row: Row, workload: PublishedWorkload) -> list[int]:
    """Pipeline stages of the ranks that the figure may come from."""
    first, last = 0, workload.layout.pp - 1
    of_rank = {"last": [last], "rank0": [first], "first": [first]}
    return of_rank.get(str(row["measured"].get("rank")), sorted({first, last}))

"""All figures of a data file of step times, and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.bands import Band, bands
from benchmarks.accuracy.ranking import Choice, RankedSet, engine_choices, ranked_sets
from benchmarks.accuracy.strata import Errors, grouped
from benchmarks.accuracy.throughput import Result, as_row
from benchmarks.accuracy.throughput_strata import constant_mfu_errors, strata, without_own_source


@dataclass(frozen=True)
class Report:
    """All figures of a data file."""

    results: list[Result]
    ours: dict[str, Errors]
    constant_mfu: dict[str, Errors]
    without_own_source: dict[str, Errors]
    sets: list[RankedSet]
    choices: list[Choice]
    bands: list[Band]
    independent: bool = False
    """Whether no constant of the cost model was estimated from these rows: nothing is left out then."""

    @property
    def ranking(self) -> dict[str, float]:
        """Over the sets, one weight each."""
        if not self.sets:
            return {}
        regrets = [entry.regret for entry in self.sets]
        return {
            "sets": len(self.sets),
            "median_regret": statistics.median(regrets),
            "worst_regret": max(regrets),
            "worst_regret_without_contradicted": max(
                (entry.regret for entry in self.sets if not entry.contradicted), default=0.0
            ),
            "median_spearman": statistics.median(entry.spearman for entry in self.sets),
        }


def report_of(results: list[Result], independent: bool = False) -> Report:
    """Predictions, the baseline's and those without each row's own source."""
    constant = constant_mfu_errors(results)
    held_out = (
        {result.row["id"]: result.relative_error or 0.0 for result in results}
        if independent
        else without_own_source(results)
    )
    return Report(
        results=results,
        ours=strata(results),
        constant_mfu=strata(results, lambda result: constant[result.row["id"]]),
        without_own_source=strata(results, lambda result: held_out[result.row["id"]]),
        sets=ranked_sets(results),
        choices=engine_choices(results),
        bands=bands(results, held_out),
        independent=independent,
    )


def as_json(report: Report) -> dict[str, Any]:
    """``rows`` and ``strata``; the baseline and leave-one-source-out under the same names."""
    return {
        "rows": [as_row(result) for result in report.results],
        "strata": {name: asdict(errors) for name, errors in report.ours.items()},
        "constant_mfu": {name: asdict(errors) for name, errors in report.constant_mfu.items()},
        "without_own_source": {name: asdict(errors) for name, errors in report.without_own_source.items()},
        "ranking": report.ranking,
        "ranked_sets": [asdict(entry) for entry in report.sets],
        "engine_choices": [asdict(entry) for entry in report.choices],
        "bands": [asdict(band) for band in report.bands],
    }


def left_out(report: Report) -> list[str]:
    """Every row that enters no error figure, by reason."""
    reasons = grouped(
        (f"not {'predicted' if each.skipped else 'counted'}: {each.skipped or each.excluded}", each.row["id"])
        for each in report.results
        if each.skipped or each.excluded
    )
    return [f"{reason} ({len(names)} rows): {', '.join(names)}" for reason, names in sorted(reasons.items())]

"""What the throughput command prints, and writes as JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.bands import Band, bands
from benchmarks.accuracy.ranking import Choice, RankedSet, contradicted, engine_choices, ranked_sets
from benchmarks.accuracy.strata import Errors
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


def as_text(report: Report, every_row: bool) -> str:
    """Rows by component, then the strata."""
    lines = [_row(result) for result in report.results] if every_row else []
    lines += ["", *left_out(report)]
    lines += ["", f"{'stratum':64} {'rows':>4} {'groups':>6}  median   p90   mean | constant MFU  | other sources only"]
    for name, errors in report.ours.items():
        baseline, held_out = report.constant_mfu[name], report.without_own_source[name]
        lines.append(
            f"{name:64} {errors.rows:4} {errors.groups:6} {errors.median_absolute:7.1%} {errors.p90_absolute:6.1%} "
            f"{errors.signed_mean:+6.1%} | {baseline.median_absolute:6.1%} {baseline.p90_absolute:6.1%} | "
            f"{held_out.median_absolute:6.1%} {held_out.p90_absolute:6.1%} {held_out.signed_mean:+6.1%}"
        )
    lines += ["", "layouts of one model, cluster and batch: regret of the one ranked first, and rank correlation"]
    lines += [
        f"  {entry.regret:6.1%} {entry.spearman:+5.2f}  {entry.layouts:2} layouts, {entry.name}"
        for entry in report.sets
    ]
    if report.ranking:
        ranking = report.ranking
        lines.append(
            f"  median {ranking['median_regret']:.1%}, worst {ranking['worst_regret']:.1%}, median rank correlation "
            f"{ranking['median_spearman']:+.2f}; worst without sets of a row that contradicts its own layout's others "
            f"{ranking['worst_regret_without_contradicted']:.1%}"
        )
    lines += [
        f"  {name} takes {far:+.1%} a micro batch beside the median of its layout's other measurements"
        for name, far in contradicted(report.results).items()
    ]
    lines += ["", "engines, or eager and compiled, that ran the same job: regret of ours"]
    lines += [f"  {each.regret:6.1%}  {each.name}: {each.predicted_first}" for each in report.choices]
    if report.choices:
        regrets = [each.regret for each in report.choices]
        lines.append(f"  median {statistics.median(regrets):.1%}, worst {max(regrets):.1%}, {len(regrets)} jobs")
    lines += ["", "bands of plans: 80 % of rows lie within, predicted without their own source"]
    lines += [
        f"  ± {band.width:.0%} {band.regime} ({band.rows} rows, {band.groups} groups; holds {band.holds:.0%}; "
        f"± {band.by_group:.0%} with groups weighing one)"
        for band in report.bands
    ]
    return "\n".join(lines)


def left_out(report: Report) -> list[str]:
    """Every row that enters no error figure, by reason."""
    reasons: dict[str, list[str]] = {}
    for result in report.results:
        for words, reason in (("not predicted", result.skipped), ("not counted", result.excluded)):
            if reason:
                reasons.setdefault(f"{words}: {reason}", []).append(result.row["id"])
                break
    return [f"{reason} ({len(names)} rows): {', '.join(names)}" for reason, names in sorted(reasons.items())]


def _row(result: Result) -> str:
    head = result.row["id"]
    if result.predicted_s is None or result.measured_s is None:
        return f"{head}: {result.skipped}"
    parts = ", ".join(
        f"{name} {seconds:.3g}" for name, seconds in result.components_s.items() if seconds > 0.005 * result.predicted_s
    )
    assumed = f" [assumed {result.assumed}]" if result.assumed else ""
    error = f"{result.relative_error or 0:+.1%}"
    return f"{head} {result.measured_s:.4g} s, predicted {result.predicted_s:.4g} ({error}): {parts}{assumed}"

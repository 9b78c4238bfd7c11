"""What the throughput command prints, and writes as JSON and Markdown."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.bands import Band, bands
from benchmarks.accuracy.ranking import RankedSet, contradicted, ranked_sets
from benchmarks.accuracy.strata import Errors
from benchmarks.accuracy.throughput import Result, as_row
from benchmarks.accuracy.throughput_strata import constant_mfu_errors, estimates, strata, without_own_source


@dataclass(frozen=True)
class Report:
    """All figures of a data file."""

    results: list[Result]
    ours: dict[str, Errors]
    constant_mfu: dict[str, Errors]
    without_own_source: dict[str, Errors]
    sets: list[RankedSet]
    bands: list[Band]

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


def report_of(results: list[Result]) -> Report:
    """Predictions, the baseline's and those without each row's own source."""
    constant, held_out = constant_mfu_errors(results), without_own_source(results)
    return Report(
        results=results,
        ours=strata(results),
        constant_mfu=strata(results, lambda result: constant[result.row["id"]]),
        without_own_source=strata(results, lambda result: held_out[result.row["id"]]),
        sets=ranked_sets(results),
        bands=bands(results, held_out),
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
        "bands": [asdict(band) for band in report.bands],
    }


def as_text(report: Report, every_row: bool) -> str:
    """Rows by component, then the strata."""
    lines = [_row(result) for result in report.results] if every_row else []
    reasons: dict[str, int] = {}
    for result in report.results:
        reason = result.skipped or result.excluded
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
    lines += ["", *(f"not counted: {count} rows, {reason}" for reason, count in sorted(reasons.items()))]
    lines += ["", f"{'stratum':64} {'rows':>4} {'groups':>6}  median   p90   mean | constant MFU  | other sources only"]
    for name, errors in report.ours.items():
        baseline, held_out = report.constant_mfu[name], report.without_own_source[name]
        lines.append(
            f"{name:64} {errors.rows:4} {errors.groups:6} {errors.median_absolute:7.1%} {errors.p90_absolute:6.1%} "
            f"{errors.signed_mean:+6.1%} | {baseline.median_absolute:6.1%} {baseline.p90_absolute:6.1%} | "
            f"{held_out.median_absolute:6.1%} {held_out.p90_absolute:6.1%}"
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
    lines += ["", "bands of plans: 80 % of rows lie within, predicted without their own source"]
    lines += [
        f"  ± {band.width:.0%} {band.regime} ({band.rows} rows, {band.groups} groups; holds {band.holds:.0%}; "
        f"± {band.by_group:.0%} with groups weighing one)"
        for band in report.bands
    ]
    return "\n".join(lines)


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


def as_markdown(report: Report, source: str) -> str:
    """docs/accuracy-throughput.md."""
    lines = [
        "# How good are the step-time predictions?",
        "",
        f"Generated by `python -m benchmarks.accuracy throughput --data {source} --markdown FILE`.",
        "Rows are published measurements of real runs, of many programs and software releases (the",
        "same configuration moves by",
        "5 to 80 % between releases; identical runs differ by up to 6 %). Errors are of the step",
        "time; every group of rows (one",
        "source table and model) weighs one. How terms come about: [step-time](step-time.md).",
        "",
        "Beside each figure: a **constant MFU** (one a GPU generation and precision, the best one",
        "for these very rows, a third",
        "more FLOPs counted where recompute is full), and **other sources**: the same prediction",
        "with the rates of products",
        "estimated without the row's own source (a kind that no other source measured borrows the share of Hopper).",
        "",
        "| stratum | rows | groups | median | 90th percentile | signed mean | constant MFU | other sources |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, errors in report.ours.items():
        baseline, held_out = report.constant_mfu[name], report.without_own_source[name]
        lines.append(
            f"| {name} | {errors.rows} | {errors.groups} | {errors.median_absolute:.1%} | {errors.p90_absolute:.1%} "
            f"| {errors.signed_mean:+.1%} | {baseline.median_absolute:.1%}, {baseline.p90_absolute:.1%} "
            f"| {held_out.median_absolute:.1%}, {held_out.p90_absolute:.1%} |"
        )
    lines += [
        "",
        '"Assumed": what a row does not state (recompute mode, micro batch, virtual stages) is taken as the',
        "fastest that fits by the memory model; such rows enter no other line.",
        "",
        "## Ranking",
        "",
        "Layouts of one model, cluster and batch: measured step time of the layout that the model",
        "ranks first over the best",
        "measured one, and the rank correlation.",
        "",
        "| set | layouts | regret | Spearman |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {entry.name} | {entry.layouts} | {entry.regret:.1%} | {entry.spearman:.2f} |" for entry in report.sets
    ]
    if report.ranking:
        ranking = report.ranking
        lines += [
            "",
            f"Median regret {ranking['median_regret']:.1%}, worst {ranking['worst_regret']:.1%}, median "
            f"rank correlation "
            f"{ranking['median_spearman']:.2f}. Worst without the sets that hold a row which contradicts other "
            f"measurements of its own layout by more than a tenth: {ranking['worst_regret_without_contradicted']:.1%}. "
            "No prediction enters that comparison (`ranking.contradicted`), only measured seconds for each micro batch "
            "that passes the pipeline:",
            "",
            *(f"- `{name}`: {far:+.0%}" for name, far in contradicted(report.results).items()),
            "",
            "In xtuner's set all eight-stage layouts were measured 7 to 16 % slower than predicted, and all of 32",
            "stages 4 to 12 % faster, with as many passes of a layer, as much exchanged in a node and room in memory;",
            "overlapping the gradients made a run slower there. Which cost of a step that is, the rows do not say; a",
            "rate of all-to-alls that would reverse the first two contradicts NVIDIA's rows over a fabric.",
        ]
    lines += [
        "",
        "## Bands",
        "",
        "What `kit plan` prints: of rows like it, predicted without their own source, 80 % lie",
        "within the band. A band belongs to the",
        "code that ran; for other code it is called borrowed.",
        "",
        "| regime | rows | groups | band | rows within | groups weighing one |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {band.regime} | {band.rows} | {band.groups} | ± {band.width:.0%} | {band.holds:.0%} "
        f"| ± {band.by_group:.0%} |"
        for band in report.bands
    ]
    lines += ["", "## Constants estimated from rows", "", *_constants(report.results), ""]
    far = [result for result in report.results if result.counted and abs(result.relative_error or 0.0) > 0.3]
    lines += [
        "## Far off",
        "",
        "Counted rows with an error above 30 %, each a place where the model is not good enough:",
        "",
    ]
    lines += [
        f"- `{result.row['id']}`: {result.measured_s:.3g} s measured, {result.predicted_s:.3g} predicted"
        for result in far
    ] or ["- none"]
    skipped: dict[str, int] = {}
    for result in report.results:
        if result.skipped:
            skipped[result.skipped] = skipped.get(result.skipped, 0) + 1
    lines += ["", "Not predicted:", ""] + [f"- {count} rows: {reason}" for reason, count in sorted(skipped.items())]
    return "\n".join(lines) + "\n"


def _constants(results: list[Result]) -> list[str]:
    lines = [
        "Rates of products: factor on the catalog's share that fits a kind's rows best, from all",
        "rows, and from all but one source",
        "(least and most). A kind with a single source has no second estimate.",
        "",
        "| kind | all rows | without one source |",
        "|---|---|---|",
    ]
    for name, found in estimates(results).items():
        others = [factor for source, factor in found.items() if source != "none"]
        span = f"{min(others):.2f} to {max(others):.2f}" if others else "one source only"
        lines.append(f"| {name} | {found.get('none', 1.0):.2f} | {span} |")
    lines += [
        "",
        "Chosen with rows in view, one value for all: the share of sharded weights that nothing",
        "hides (0.65; 0.25 prefetched), kernels",
        "of layers with experts, the host's time for a kernel, the rate of flash-attn's first",
        "version, rates of small tiles.",
    ]
    return lines

"""The pages of step-time accuracy: docs/accuracy-throughput.md, and docs/accuracy-elsewhere.md of independent rows."""

from __future__ import annotations

from textwrap import wrap

from benchmarks.accuracy.ranking import contradicted
from benchmarks.accuracy.throughput import Result
from benchmarks.accuracy.throughput_report import Report
from benchmarks.accuracy.throughput_strata import estimates
from benchmarks.page import header, table

FAR = 0.3
"""Errors beyond which a row is named."""
INTRODUCTION = """
Rows are published measurements of real runs, of many programs and software releases (the same configuration moves by
5 to 80 % between releases; identical runs differ by up to 6 %). Errors are of the step time; every group of rows (one
source table and model) weighs one. How terms come about: [step-time](step-time.md).

Beside each figure: a **constant MFU** (one a GPU generation and precision, the best one for these very rows, a third
more FLOPs counted where recompute is full), and **other sources**: the same prediction with the rates of products
estimated without the row's own source (a kind that no other source measured borrows the share of Hopper). Rows of
sources that no constant was estimated from have [a page of their own](accuracy-elsewhere.md).
"""
INDEPENDENT = """
The [other page](accuracy-throughput.md) leaves one source out at a time. Here stand rows of sources from which no
constant of the cost model was ever estimated: what a plan for a cluster that nobody tuned the model on may expect.

Beside each figure: a **constant MFU**, the best one for these very rows. Every group of rows (one source table and
model) weighs one.
"""
XTUNER = """
In xtuner's set (256 H800) all eight-stage layouts were measured 7 to 16 % slower than predicted, and all of 32
stages 4 to 12 % faster, with as many passes of a layer, as much exchanged in a node and room in memory; overlapping
the gradients made a run slower there. NVIDIA measured two layouts of that set on 256 H100
([elsewhere](accuracy-elsewhere.md)): eight stages with experts over four nodes by DeepEP took 19.7 s and 32 stages
with experts on a node 24.2 s, where xtuner's took 25.7 and 22.4. The H100 differs by faster links inside a node, and
the layout that stays inside was slower on it: releases of the software decide the order of this pair, by more than the
tenth that is asked for, and differently in each source. The model, which knows the links alone, predicts 22.6 and 23.2
on H800, 22.4 and 21.2 on H100.
"""
FABRIC = """
Most of what is missing in Aleph Alpha's rows is missing where data parallelism is wide: the fabric is assumed. With
a quarter or an eighth of it (two or one port of 200 Gb/s a node, as their paper may be read) the same rows have a
median error of 5 or 7 % and a 90th percentile of 15 %, and the 256 GPU sets are ranked without regret. That would
be choosing an input by its outcome; the table stays with the DGX as sold.
"""


def as_markdown(report: Report, source: str, about: str = "") -> str:
    """The whole page."""
    title = "Step times elsewhere: sources the model has never seen" if report.independent else TITLE
    introduction = INTRODUCTION.strip().splitlines()
    if report.independent:
        introduction = [
            *INDEPENDENT.strip().splitlines(),
            "",
            "What the file says of its rows:",
            "",
            *wrap(about, 116),
        ]
    lines = [
        header(title, f"python -m benchmarks.accuracy throughput --data {source} --markdown FILE"),
        *introduction,
        "",
        *_strata(report),
        "",
        "## Ranking",
        "",
        *_ranking(report),
    ]
    lines += ["", "## Bands", "", *_bands(report)]
    if not report.independent:
        lines += ["", "## Constants estimated from rows", "", *_constants(report.results)]
    lines += ["", "## Far off", "", *_far_off(report)]
    return "\n".join(lines) + "\n"


TITLE = "How good are the step-time predictions?"


def _strata(report: Report) -> list[str]:
    heads = ["stratum", "rows", "groups", "median", "90th percentile", "signed mean", "constant MFU", "other sources"]
    rows = []
    for name, errors in report.ours.items():
        both = (
            f"{each[name].median_absolute:.1%}, {each[name].p90_absolute:.1%}"
            for each in (report.constant_mfu, report.without_own_source)
        )
        own = (f"{errors.median_absolute:.1%}", f"{errors.p90_absolute:.1%}", f"{errors.signed_mean:+.1%}")
        rows.append((name, errors.rows, errors.groups, *own, *both))
    columns = len(heads) - report.independent
    lines = [table(heads[:columns], [cells[:columns] for cells in rows])]
    if any(result.assumed for result in report.results):
        lines += [
            "",
            '"Assumed": what a row does not state (recompute mode, micro batch, virtual stages) is taken as the',
            "fastest that fits by the memory model; such rows enter no other line.",
        ]
    return lines


def _ranking(report: Report) -> list[str]:
    lines = [
        "Layouts of one model, cluster and batch: measured step time of the layout that the model ranks first over the",
        "best measured one, and the rank correlation.",
        "",
    ]
    sets = [(each.name.strip(), each.layouts, f"{each.regret:.1%}", f"{each.spearman:.2f}") for each in report.sets]
    lines.append(table(("set", "layouts", "regret", "Spearman"), sets))
    if not report.ranking:
        return lines
    ranking = report.ranking
    found = f"Median regret {ranking['median_regret']:.1%}, worst {ranking['worst_regret']:.1%}, "
    found += f"median rank correlation {ranking['median_spearman']:.2f}."
    if report.independent:
        return [*lines, "", found, *FABRIC.rstrip().splitlines()]
    return [
        *lines,
        "",
        f"{found} Worst without the sets that hold a row which contradicts other measurements of its own layout by "
        f"more than a tenth: {ranking['worst_regret_without_contradicted']:.1%}. No prediction enters that comparison "
        "(`ranking.contradicted`), only measured seconds for each micro batch that passes the pipeline:",
        "",
        *(f"- `{name}`: {far:+.0%}" for name, far in contradicted(report.results).items()),
        *XTUNER.rstrip().splitlines(),
    ]


def _bands(report: Report) -> list[str]:
    lines = [
        "What `kit plan` prints: of rows like it, predicted without their own source, 80 % lie within the band. A band",
        "belongs to the code that ran; for other code it is called borrowed."
        + (" Megatron's plans on kit's own layers take" if report.independent else ""),
        *(["the one of torch's kernels here, on the generation of GPUs that it was measured on."] * report.independent),
        "",
    ]
    rows = [
        (each.regime, each.rows, each.groups, f"± {each.width:.0%}", f"{each.holds:.0%}", f"± {each.by_group:.0%}")
        for each in report.bands
    ]
    return [*lines, table(("regime", "rows", "groups", "band", "rows within", "groups weighing one"), rows)]


def _constants(results: list[Result]) -> list[str]:
    lines = [
        "Rates of products: factor on the catalog's share that fits a kind's rows best, from all rows, and from all",
        "but one source (least and most). A kind with a single source has no second estimate.",
        "",
    ]
    rows = []
    for name, found in estimates(results).items():
        others = [factor for source, factor in found.items() if source != "none"]
        span = f"{min(others):.2f} to {max(others):.2f}" if others else "one source only"
        rows.append((name, f"{found.get('none', 1.0):.2f}", span))
    return [
        *lines,
        table(("kind", "all rows", "without one source"), rows),
        "",
        "Chosen with rows in view, one value for all: the share of sharded weights that nothing hides (0.65; 0.25",
        "prefetched), kernels of layers with experts, the host's time for a kernel, the rate of flash-attn's first",
        "version, rates of small tiles.",
    ]


def _far_off(report: Report) -> list[str]:
    far = [result for result in report.results if result.counted and abs(result.relative_error or 0.0) > FAR]
    lines = [f"Counted rows with an error above {FAR:.0%}, each a place where the model is not good enough:", ""]
    lines += [
        f"- `{result.row['id']}`: {result.measured_s:.3g} s measured, {result.predicted_s:.3g} predicted"
        for result in far
    ] or ["- none"]
    skipped: dict[str, int] = {}
    for result in report.results:
        if result.skipped:
            skipped[result.skipped] = skipped.get(result.skipped, 0) + 1
    if skipped:
        lines += ["", "Not predicted:", "", *(f"- {count} rows: {why}" for why, count in sorted(skipped.items()))]
    return lines

"""The pages of step-time accuracy: docs/accuracy-throughput.md, and docs/accuracy-elsewhere.md of independent rows."""

from __future__ import annotations

from textwrap import wrap

from benchmarks.accuracy.ranking import contradicted
from benchmarks.accuracy.throughput import Result
from benchmarks.accuracy.throughput_report import Report, left_out
from benchmarks.accuracy.throughput_strata import estimates
from tests.support.page import header, table

FAR = 0.3
"""Errors beyond which a row is named."""
INTRODUCTION = """
A row is a published measurement of a real run. The rows come from many programs and releases: one configuration
changes by 5 to 80 % between releases, and identical runs differ by up to 6 %. Errors are relative errors of the
step time. Each group of rows (one source table and model) has the same weight. Where our file of rows says otherwise
than a row's own source, the source counts (`benchmarks/accuracy/mended.json`, in its words). [Step time](step-time.md)
says where the terms come from.

Two columns compare. **Constant MFU** predicts with one MFU per GPU generation and precision, the best one for these
rows; full recompute counts a third more FLOPs. **Other sources** is kit's prediction with GEMM rates that were
estimated without the row's own source (median, 90th percentile, mean). In 16 bits, and in fp8 on Hopper, one share of
what single GEMMs reach serves all GPUs. A rate that one source decided is, for rows of that source, the same share of
single GEMMs on that GPU; for other rows it stays. Sources from which no constant was estimated have [a page of their
own](accuracy-elsewhere.md).
"""
INDEPENDENT = """
The [other page](accuracy-throughput.md) leaves one source out at a time. No constant of the cost model was ever
estimated from the sources on this page. It shows what to expect of a plan for a cluster on which nobody tuned the
model.

The column **constant MFU** predicts with one MFU, the best one for these rows. Each group of rows (one source table and
model) has the same weight.
"""
XTUNER = """
In xtuner's set (256 H800) all layouts with 8 stages ran 7 to 17 % slower than predicted, and all with 32 stages 3 to
12 % faster. Both compute each layer as often, send as much inside a node and have room in memory. NVIDIA measured two
layouts of that set on 256 H100 ([elsewhere](accuracy-elsewhere.md)) and found the opposite order:

| layout | xtuner, H800 | predicted | NVIDIA, H100 | predicted |
|---|---|---|---|---|
| 8 stages, experts over four nodes by DeepEP | 25.7 s | 22.4 s | 19.7 s | 22.2 s |
| 32 stages, experts inside a node | 22.4 s | 23.1 s | 24.2 s | 21.1 s |

The H100 has faster links inside a node, but the layout that stays inside a node is the slower one there. The links
do not explain this; the releases of the software may.
"""
FABRIC = """
Most of the error in Aleph Alpha's rows is in runs with wide data parallelism, and their fabric is an assumption.
Their paper may mean two ports or one port of 200 Gb/s a node. With that quarter or eighth of the assumed bandwidth
the same rows have a median error of 5 or 7 % and a 90th percentile of 15 %, and the sets of 256 GPUs are ranked
without regret. kit keeps the fabric of a DGX as it is sold: an input must not be chosen by its outcome.
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
    parts = {
        "Ranking": _ranking(report),
        "Engines": _choices(report),
        "Bands": _bands(report),
        **({} if report.independent else {"Constants estimated from rows": _constants(report.results)}),
        "Far off": _far_off(report),
        "Left out": [f"- {line}" for line in left_out(report) or ["none"]],
    }
    head = header(title, f"python -m benchmarks.accuracy throughput --data {source} --markdown FILE")
    picture = f"images/accuracy-{'elsewhere' if report.independent else 'throughput'}.svg"
    drawn = f"![predicted over measured step times, by engine]({picture})"
    lines = [head, *introduction, "", drawn, "", *_strata(report)]
    lines += [line for name, part in parts.items() for line in ("", f"## {name}", "", *part)]
    return "\n".join(lines) + "\n"


TITLE = "How good are the step-time predictions?"


def _strata(report: Report) -> list[str]:
    heads = ["stratum", "rows", "groups", "median", "90th percentile", "signed mean", "constant MFU", "other sources"]
    rows = []
    for name, errors in report.ours.items():
        constant, others = report.constant_mfu[name], report.without_own_source[name]
        cells = (
            *(f"{errors.median_absolute:.1%}", f"{errors.p90_absolute:.1%}", f"{errors.signed_mean:+.1%}"),
            f"{constant.median_absolute:.1%}, {constant.p90_absolute:.1%}",
            f"{others.median_absolute:.1%}, {others.p90_absolute:.1%}, {others.signed_mean:+.1%}",
        )
        rows.append((name, errors.rows, errors.groups, *cells))
    columns = len(heads) - report.independent
    assumed = [
        "",
        '"Assumed": the row does not state recompute mode, micro batch or virtual stages. The model takes the',
        "fastest that fits by the memory model. Such rows count in no other line.",
    ]
    made = table(heads[:columns], [cells[:columns] for cells in rows])
    return [made, *(assumed if any(result.assumed for result in report.results) else [])]


def _ranking(report: Report) -> list[str]:
    lines = [
        "A set has several layouts of one model, cluster and batch. Regret is the measured step time of the layout",
        "that the model ranks first, over the best measured one, less one. Spearman is the rank correlation.",
        "",
    ]
    sets = [(each.name.strip(), each.layouts, f"{each.regret:.1%}", f"{each.spearman:.2f}") for each in report.sets]
    lines.append(table(("set", "layouts", "regret", "Spearman"), sets))
    if not report.ranking:
        return lines
    ranking = report.ranking
    found = (
        f"Median regret {ranking['median_regret']:.1%}, worst {ranking['worst_regret']:.1%}, "
        f"median rank correlation {ranking['median_spearman']:.2f}."
    )
    if report.independent:
        return [*lines, "", found, *FABRIC.rstrip().splitlines()]
    return [
        *lines,
        "",
        f"{found} Some rows contradict other measurements of their own layout by more than a tenth; without the sets "
        f"that have such a row the worst regret is {ranking['worst_regret_without_contradicted']:.1%}. That comparison "
        "(`ranking.contradicted`) uses no prediction, only measured seconds per micro batch:",
        "",
        *(f"- `{name}`: {far:+.0%}" for name, far in contradicted(report.results).items()),
        *XTUNER.rstrip().splitlines(),
    ]


def _choices(report: Report) -> list[str]:
    rows = [(each.name, each.predicted_first, each.measured_first, f"{each.regret:.1%}") for each in report.choices]
    return [
        "Jobs that two engines ran, or one eager and compiled: what is predicted to be the fastest, and what was.",
        "",
        table(("job", "predicted", "measured", "regret"), rows) if rows else "No job was run by two.",
    ]


def _bands(report: Report) -> list[str]:
    lines = [
        "`kit plan` prints a band: 80 % of similar rows, predicted without their own source, are within it. A band",
        "belongs to the code that ran; for other code kit says that it is borrowed."
        + (" Megatron plans on kit's own layers use" if report.independent else ""),
        *(["the band of torch's kernels on this page, for the same GPU generation."] * report.independent),
        "",
    ]
    rows = [
        (each.regime, each.rows, each.groups, f"± {each.width:.0%}", f"{each.holds:.0%}", f"± {each.by_group:.0%}")
        for each in report.bands
    ]
    return [*lines, table(("regime", "rows", "groups", "band", "rows within", "groups weighing one"), rows)]


def _constants(results: list[Result]) -> list[str]:
    lines = [
        "Rates of GEMMs: the factor on the catalog's rate that fits the rows of a constant best. One column uses all",
        "rows, the other leaves each source out in turn (least and most). A constant with a single source has no",
        "second estimate.",
        "",
    ]
    rows = []
    for name, found in estimates(results).items():
        others = [factor for source, factor in found.items() if source != "none"]
        span = f"{min(others):.2f} to {max(others):.2f}" if others else "one source only"
        rows.append((name, f"{found.get('none', 1.0):.2f}", span))
    return [
        *lines,
        table(("rows", "all rows", "without one source"), rows),
        "",
        "These constants were chosen with the rows in view, one value for all: the share of sharded communication",
        "that compute does not hide (0.65), the number of kernels in layers with experts,",
        "the host's time for a kernel, the rate of flash-attn's first version, rates of small tiles.",
    ]


def _far_off(report: Report) -> list[str]:
    far = [
        f"- `{each.row['id']}`: {each.measured_s:.3g} s measured, {each.predicted_s:.3g} predicted"
        for each in report.results
        if each.counted and abs(each.relative_error or 0.0) > FAR
    ]
    return [f"Counted rows with an error above {FAR:.0%}: here the model is not good enough.", "", *(far or ["- none"])]

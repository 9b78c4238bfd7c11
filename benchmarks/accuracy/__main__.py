"""``python -m benchmarks.accuracy memory|throughput --data FILE [--json OUT] [--markdown OUT]``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.accuracy import bands, expect_page, picture, report, throughput_page, throughput_report
from benchmarks.accuracy.fields import engine_of
from benchmarks.accuracy.memory import results_of
from benchmarks.accuracy.rows import about, load
from benchmarks.accuracy.strata import grouped
from benchmarks.accuracy.throughput import result_of
from kit.errors import SpecError


def main() -> None:
    """Parse, predict, print the page; ``--json`` has every row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("what", choices=["memory", "throughput"])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="rows of published measurements, JSON")
    parser.add_argument("--json", type=Path, help="write predictions and strata there")
    parser.add_argument("--markdown", type=Path, help="write the accuracy page there, its picture below images/")
    parser.add_argument("--bands", type=Path, help="throughput: write the planner's bands there")
    parser.add_argument("--expect", type=Path, help="throughput: write the page of what to expect of each plan there")
    given = parser.parse_args()
    several, names = len(given.data) > 1, " ".join(path.name for path in given.data)
    try:
        rows = [row | {"file": path.name} if several else row for path in given.data for row in load(path)]
    except SpecError as error:
        parser.error(str(error))
    if given.what == "throughput":
        words = about(given.data[0])
        found = throughput_report.report_of([result_of(row) for row in rows], independent=words is not None)
        drawn, unit = [(each.row, each.measured_s, each.predicted_s) for each in found.results if each.counted], "s"
        page, figures = throughput_page.as_markdown(found, names, words or ""), throughput_report.as_json(found)
        written = [
            (given.expect, expect_page.as_markdown(found.bands, f"{names} --expect FILE")),
            (given.bands, bands.as_yaml(found.bands, names)),
        ]
    else:
        results = [result for row in rows for result in results_of(row)]
        page, figures, written = report.as_markdown(results, names), report.as_json(results), []
        counted = [each for each in results if not each.excluded and each.statistic != "allocated"]
        drawn, unit = [(each.row, each.measured_gib, each.predicted_gib) for each in counted], "GiB"
    print(page)
    points = grouped((engine_of(row), (ran, said)) for row, ran, said in drawn if ran and said)
    if given.markdown:
        (images := given.markdown.parent / "images").mkdir(exist_ok=True)
        written.append((images / f"{given.markdown.stem}.svg", picture.as_svg(points, unit)))
    for path, text in [*written, (given.json, json.dumps(figures, indent=1) + "\n"), (given.markdown, page)]:
        if path:
            path.write_text(text)


if __name__ == "__main__":
    main()

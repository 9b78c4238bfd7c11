"""``python -m benchmarks.accuracy memory|throughput --data FILE [--json OUT] [--markdown OUT] [--quiet]``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy import bands, expect_page, report, throughput_page, throughput_report
from benchmarks.accuracy.memory import results_of
from benchmarks.accuracy.rows import about, load
from benchmarks.accuracy.throughput import result_of
from kit.errors import SpecError


def main() -> None:
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("what", choices=["memory", "throughput"])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="rows of published measurements, JSON")
    parser.add_argument("--json", type=Path, help="write predictions and strata there")
    parser.add_argument("--markdown", type=Path, help="write the accuracy page there")
    parser.add_argument("--bands", type=Path, help="throughput: write the planner's bands there")
    parser.add_argument("--expect", type=Path, help="throughput: write the page of what to expect of each plan there")
    parser.add_argument("--quiet", action="store_true", help="print the strata without the rows")
    given = parser.parse_args()
    try:
        several = len(given.data) > 1
        rows = [row | {"file": path.name} if several else row for path in given.data for row in load(path)]
    except SpecError as error:
        parser.error(str(error))
    names = " ".join(path.name for path in given.data)
    if given.what == "throughput":
        words = about(given.data[0])
        results: list[Any] = [result_of(row) for row in rows]
        found = throughput_report.report_of(results, independent=words is not None)
        text = throughput_report.as_text(found, not given.quiet)
        page = throughput_page.as_markdown(found, names, words or "")
        figures = throughput_report.as_json(found)
        if given.expect:
            given.expect.write_text(expect_page.as_markdown(found.bands, f"{names} --expect FILE"))
        if given.bands:
            given.bands.write_text(bands.as_yaml(found.bands, names))
    else:
        results = [result for row in rows for result in results_of(row)]
        text, page = report.as_text(results, every_row=not given.quiet), report.as_markdown(results, names)
        figures = report.as_json(results)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(page)


if __name__ == "__main__":
    main()

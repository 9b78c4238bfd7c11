"""``python -m benchmarks.accuracy memory --data FILE [--json OUT] [--markdown OUT] [--rows]``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.accuracy.memory import results_of
from benchmarks.accuracy.report import as_json, as_markdown, as_text
from benchmarks.accuracy.rows import load


def main() -> None:
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("what", choices=["memory"])
    parser.add_argument("--data", type=Path, required=True, help="rows of published measurements, JSON")
    parser.add_argument("--json", type=Path, help="write predictions and strata there")
    parser.add_argument("--markdown", type=Path, help="write the accuracy page there")
    parser.add_argument("--quiet", action="store_true", help="print the strata without the rows")
    given = parser.parse_args()
    results = [result for row in load(given.data) for result in results_of(row)]
    print(as_text(results, every_row=not given.quiet))
    if given.json:
        given.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(as_markdown(results, given.data.name))


if __name__ == "__main__":
    main()

"""Measure every configuration on two gloo processes, write the table, fail where a term differs by over 2 %."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.accuracy.deepspeed_bytes.cases import CASES, WORLD_SIZE
from benchmarks.accuracy.deepspeed_bytes.compare import page, terms
from tests.support import ROOT
from tests.support.page import write_json
from tests.support.runs import output, torchrun

PAGE = ROOT / "docs" / "deepspeed-bytes.md"
RESULTS = ROOT / "benchmarks" / "results" / "deepspeed-bytes.json"
"""Results that the accuracy page reads."""


def main() -> int:
    """Exit code 1 where cost model and engine disagree."""
    with tempfile.TemporaryDirectory(prefix="kit-bytes-") as directory:
        out = Path(directory) / "measured.json"
        output(torchrun(WORLD_SIZE, "benchmarks.accuracy.deepspeed_bytes.worker", out))
        measured = json.loads(out.read_text(encoding="utf-8"))
    found = [term for case in CASES for term in terms(case, measured[case.name])]
    PAGE.write_text(page(found), encoding="utf-8")
    write_json(RESULTS, [dataclasses.asdict(term) for term in found])
    wrong = [term for term in found if not term.agrees]
    for term in wrong:
        pair = f"{term.predicted:.3f} predicted, {term.measured:.3f} measured"
        print(f"{term.case}: {term.name}: {pair}", file=sys.stderr)
    print(f"{PAGE.relative_to(ROOT)}: {len(CASES)} configurations, {len(found)} terms, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

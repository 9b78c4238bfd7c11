"""Measure every configuration on two gloo processes, write the table, fail where a term differs by over 2 %."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.accuracy.deepspeed_bytes.cases import CASES, WORLD_SIZE
from benchmarks.accuracy.deepspeed_bytes.compare import page, terms

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "deepspeed-bytes.md"
RESULTS = ROOT / "benchmarks" / "results" / "deepspeed-bytes.json"
"""The same for the accuracy page."""
LIMIT_S = 900


def main() -> int:
    """Exit code 1 where cost model and engine disagree."""
    with tempfile.TemporaryDirectory(prefix="kit-bytes-") as directory:
        out = Path(directory) / "measured.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
        command += ["-m", "benchmarks.accuracy.deepspeed_bytes.worker", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, timeout=LIMIT_S, env=environment, stdout=subprocess.DEVNULL)
        measured = json.loads(out.read_text(encoding="utf-8"))
    found = [term for case in CASES for term in terms(case, measured[case.name])]
    PAGE.write_text(page(found), encoding="utf-8")
    RESULTS.write_text(json.dumps([dataclasses.asdict(term) for term in found], indent=0) + "\n", encoding="utf-8")
    wrong = [term for term in found if not term.agrees]
    for term in wrong:
        pair = f"{term.predicted:.3f} predicted, {term.measured:.3f} measured"
        print(f"{term.case}: {term.name}: {pair}", file=sys.stderr)
    print(f"{PAGE.relative_to(ROOT)}: {len(CASES)} configurations, {len(found)} terms, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

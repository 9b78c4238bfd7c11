"""The Megatron part of the suite on Python 3.12 and megatron-core 0.19, in an environment of its own.

    python -m tests.system.megatron_019 [words for pytest]

Writes versions, date and counts to ``benchmarks/results/megatron-0.19.json``. An environment that is there already is
named by ``PYTHON312=…/bin/python``; otherwise ``scripts/parity-py312.sh`` makes one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from tests.support.page import ROOT, write_json

RESULTS = ROOT / "benchmarks" / "results" / "megatron-0.19.json"
_VERSIONS = """
import json, sys
from importlib.metadata import version
names = "megatron-core", "torch", "transformers"
print(json.dumps({"python": sys.version.split()[0], **{name: version(name) for name in names}}))
"""


def main(words: list[str]) -> int:
    """Exit code of pytest; results are written of runs that failed too."""
    words = words or ["tests/megatron"]
    given = os.environ.get("PYTHON312")
    python = given or str(ROOT / ".venv312" / "bin" / "python")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "junit.xml"
        start = [given, "-m", "pytest"] if given else ["bash", str(ROOT / "scripts" / "parity-py312.sh")]
        done = subprocess.run([*start, *words, f"--junitxml={report}", "-q"], cwd=ROOT, check=False)
        if not report.exists():  # no tests ran: the script has said why
            return done.returncode
        suite = ElementTree.parse(report).getroot()[0]
    versions = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True).stdout
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    failed = [case.attrib["name"] for case in suite.iter("testcase") if len(case)]
    write_json(
        RESULTS,
        {
            "date": date.today().isoformat(),
            "versions": json.loads(versions),
            "arguments": " ".join(words),
            **counts,
            "failed": failed,
            "seconds": round(float(suite.attrib["time"])),
        },
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

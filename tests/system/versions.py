"""The suite on a leg of ``kit/preflight/versions.json``, in an environment of its own (``.venv-LEG``).

    python -m tests.system.versions LEG [words for pytest]

``scripts/setup.sh`` makes the environment: PYTHON=…, TORCH_INDEX=… as there. Without words the tests of ``make test``
run. What ran, its date and counts are written into the file, and the table of docs/versions.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from kit.preflight.versions import LEGS
from tests.support import ROOT
from tests.support.page import Section, table, write_json

FILE = ROOT / "kit" / "preflight" / "versions.json"


def matrix() -> str:
    """A row a leg: its versions, and what came of its last run of tests."""
    names, seen = LEGS["newest"]["packages"], ("date", "ran", "passed", "failed", "skipped")
    rows = (
        [leg, row["python"], *(row["packages"].get(name, "") for name in names), *(row["tested"][key] for key in seen)]
        for leg, row in LEGS.items()
    )
    return table(("leg", "Python", *names, *seen), rows)


SECTION = Section("docs/versions.md", "legs", matrix)


def main(leg: str, *words: str) -> int:
    """Exit code of pytest; a run that failed is written too."""
    python = Path(".venv" if leg == "main" else f".venv-{leg}") / "bin" / "python"
    given = {"PYTHON": f"python{LEGS[leg]['python']}", **os.environ, "LEG": leg}
    subprocess.run(["bash", "scripts/setup.sh"], cwd=ROOT, env=given, check=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "junit.xml"
        asked = words or ("-n", "3", "--dist", "loadgroup", "-m", "not nightly")
        done = subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={report}", *asked], cwd=ROOT, check=False)
        if report.exists():
            suite = ElementTree.parse(report).getroot()[0]
            tests, failed, errors, skipped = (int(suite.attrib[k]) for k in ("tests", "failures", "errors", "skipped"))
            bad = failed + errors
            counts = {"passed": tests - bad - skipped, "failed": bad, "skipped": skipped}
            LEGS[leg]["tested"] = {"date": date.today().isoformat(), "ran": " ".join(words) or "make test", **counts}
            write_json(FILE, LEGS)
            SECTION.write()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

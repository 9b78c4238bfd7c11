"""What meets a drawn bug."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT

COLLECT = (
    "import sys; from pathlib import Path; from benchmarks.mutants import runs; "
    "print(runs._pytest(Path.cwd(), sys.argv[1:], ()))"
)


def test_files_with_a_group_of_one_process_are_collected() -> None:
    """A file that cannot be collected would notice every bug. In a process that knows no marker yet."""
    files = [str(path) for path in ROOT.glob("tests/planning/test_*.py") if "mark.xdist_group(" in path.read_text()]
    assert len(files) == 2
    done = subprocess.run([sys.executable, "-c", COLLECT, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"

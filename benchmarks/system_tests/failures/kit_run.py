"""A run of kit's own whose second rank has no memory left for its first step: what the doctor says beside its plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kit
from kit.planner.plan import Plan
from tests.support import runs
from tests.support.assets import RECIPE, ROOT, prepare

OVERRIDES = (
    "cluster=2xcpu",
    "layout.engine=torch",
    "job.global_batch_size=64",
    "layout.micro_batch_size=32",
    "run.steps=3",
)
LIMIT_S = 120


def planned() -> Plan:
    """The plan of the run, which the doctor reads the log with."""
    return kit.plan(kit.load_recipe(RECIPE, OVERRIDES))


def fail(directory: Path) -> str:
    """Emit, launch, fail; what it printed."""
    prepare()
    rundir = runs.emit(RECIPE, directory / "run", OVERRIDES)
    path = os.pathsep.join([str(Path(__file__).with_name("limited")), str(ROOT)])
    done = subprocess.run(
        ["bash", str(rundir.path / "launch.sh")],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
    )
    return done.stdout + done.stderr

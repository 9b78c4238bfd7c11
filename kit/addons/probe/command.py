"""``kit probe``: a plan's memory, measured without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kit.cli.options import AsJson


def command(
    plan: Annotated[Path, typer.Argument(help="plan.yaml of a run directory, or a file that kit plan --save wrote.")],
    stage: Annotated[int | None, typer.Option(help="Pipeline stage; all that differ if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a plan's memory: run the real model code on fake tensors, without a GPU. Needs torch."""
    # Another process: the probe patches torch for good.
    args = [sys.executable, "-m", "kit.addons.probe", str(plan), *(["--json"] if as_json else [])]
    os.execv(sys.executable, args + (["--stage", str(stage)] if stage is not None else []))

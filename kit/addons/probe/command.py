"""``kit probe``: a plan's memory, measured without a GPU."""

from __future__ import annotations

import json
import logging
import warnings
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
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # engines warn of what a probe does on purpose
    from kit.addons.probe.run import probe, render
    from kit.planner.plan import Plan

    loaded = Plan.load(plan)
    found = [probe(loaded, each) for each in (loaded.workload.stages.distinct if stage is None else (stage,))]
    typer.echo(json.dumps([each.as_json() for each in found], indent=1) if as_json else render(loaded, found))

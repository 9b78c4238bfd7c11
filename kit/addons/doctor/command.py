"""``kit doctor``: what is wrong with machines before a run, and the cause of a failure in logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.addons.doctor.logs.cause import Cause
from kit.cli.options import AsJson, answer
from kit.errors import SpecError
from kit.preflight.check_result import CheckResult

ANSWERS = {"doctor": list[CheckResult], "doctor LOGS": list[Cause]}


def command(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(help="Logs of all ranks, or directories of logs; without one, check machines."),
    ] = None,
    hosts: Annotated[Path | None, typer.Option(help="Check every host of this hostfile, by ssh.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run directory: check what its plan needs and predicts.")] = None,
    port: Annotated[int | None, typer.Option(help="Rendezvous port to check (29500).", min=1024, max=65535)] = None,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Also measure disks, copies and collectives.")] = False,
    as_json: AsJson = False,
) -> None:
    """Before a run, check this machine or all hosts of a hostfile. After it, find the cause of a failure in its logs.

    Exit code 1 where something is wrong."""
    if not logs:
        _machines(hosts, plan, port, bandwidth, as_json)
        return
    if hosts or bandwidth or port:
        raise SpecError("--hosts, --port and --bandwidth look at machines; give them without logs")
    from kit.addons.doctor.logs import diagnose
    from kit.emit.run_directory import RunDirectory

    causes = diagnose(logs, RunDirectory.open(plan).plan if plan else None)
    answer(causes, "\n".join(map(str, causes)) or "no known sign of a failure", as_json)
    if causes:
        raise typer.Exit(1)


def _machines(hosts: Path | None, plan: Path | None, port: int | None, bandwidth: bool, as_json: bool) -> None:
    """``kit doctor`` without a log."""
    import time

    from kit.addons.doctor.machines.hosts import PORT, examine
    from kit.addons.doctor.machines.remote import read_hostfile
    from kit.addons.doctor.machines.results import table
    from kit.emit.run_directory import RunDirectory

    begin = time.monotonic()
    names = read_hostfile(hosts) if hosts else []
    rundir = RunDirectory.open(plan) if plan else None
    results = examine(names, rundir, port or PORT)
    if bandwidth:
        from kit.addons.doctor.machines.bandwidth import measure

        results = sorted([*measure(names, rundir, port or PORT), *results], key=lambda v: v.state != "failure")
    lines = [table(results, time.monotonic() - begin), rundir.memory_after_edits() if rundir else ""]
    answer(results, "\n".join(filter(None, lines)), as_json)
    if any(result.state == "failure" for result in results):
        raise typer.Exit(1)

"""Commands that look for what is wrong: ``lint`` in files, ``doctor`` in machines and in logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.cli.options import AsJson, answer, count
from kit.errors import SpecError
from kit.specs.text import nearest

_LONGEST_SEQUENCE = 1 << 30


def lint(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="ds_config.json, accelerate YAML, recipe, run directory, script with launch lines, or Kubernetes job."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to check memory against.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Cluster to check batch sizes and memory against.")] = None,
    reader: Annotated[
        str | None, typer.Option(help="Program that reads the DeepSpeed file: deepspeed, accelerate or trainer.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence (the model's longest, at most 4096).", parser=count)
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Judge memory with gradient checkpointing on.")
    ] = False,
    as_json: AsJson = False,
    write_fixed: Annotated[
        Path | None, typer.Option("--write-fixed", help="Write a corrected copy of the file to this path.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Print every rule, as a table.")] = False,
) -> None:
    """Find errors in a configuration before you pay for GPUs.

    Exit code 1 if a finding is an error, 2 if nothing could be read."""
    import functools

    from kit.diagnose.lint import READERS, lint, read_values
    from kit.diagnose.lint import write_fixed as write_corrected
    from kit.diagnose.lint.rule import markdown
    from kit.specs.catalog import load_model, parse_cluster

    if rules:
        typer.echo(markdown())
        return
    if not paths:
        raise SpecError("nothing to read; name a ds_config.json, accelerate YAML, recipe, script or run directory")
    if seq_length is not None and seq_length > _LONGEST_SEQUENCE:
        raise SpecError(f"--seq-length {seq_length} should be at most {_LONGEST_SEQUENCE}")
    if reader is not None and reader not in READERS:
        raise SpecError(f"--reader {reader!r}: {nearest(reader, list(READERS))}")
    if write_fixed is not None and (len(paths) > 1 or paths[0].suffix not in (".json", ".yaml", ".yml")):
        raise SpecError("--write-fixed writes a copy of one file; name one .json or .yaml file")
    judge = functools.partial(
        lint,
        reader=reader,
        model=load_model(model) if model else None,
        cluster=parse_cluster(gpus) if gpus else None,
        seq_length=seq_length,
        gradient_checkpointing=gradient_checkpointing,
    )
    of_each = [judge(path) for path in paths]
    findings = [finding for found in of_each for finding in found]
    if write_fixed is not None:
        own = [finding for finding in findings if finding.file == paths[0].name]
        write_corrected(read_values(paths[0]), own, write_fixed)
    counts = ", ".join(f"{sum(f.severity == s for f in findings)} {s}s" for s in ("error", "warning", "note"))
    last = counts + (f"; corrected copy: {write_fixed}" if write_fixed else "")
    answer([finding.as_json() for finding in findings], "\n".join([*map(str, findings), last]), as_json)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)
    if all({(finding.rule, finding.severity) for finding in found} == {("not-read", "warning")} for found in of_each):
        raise typer.Exit(2)


def doctor(
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
    from kit.diagnose.logs import diagnose
    from kit.emit.run_directory import RunDirectory

    causes = diagnose(logs, RunDirectory.open(plan).plan if plan else None)
    answer(causes, "\n".join(map(str, causes)) or "no known sign of a failure", as_json)
    if causes:
        raise typer.Exit(1)


def _machines(hosts: Path | None, plan: Path | None, port: int | None, bandwidth: bool, as_json: bool) -> None:
    """``kit doctor`` without a log."""
    import time

    from kit.emit.run_directory import RunDirectory
    from kit.preflight.check_result import table
    from kit.preflight.hosts import PORT, examine
    from kit.preflight.remote import read_hostfile

    begin = time.monotonic()
    names = read_hostfile(hosts) if hosts else []
    rundir = RunDirectory.open(plan) if plan else None
    results = examine(names, rundir, port or PORT)
    if bandwidth:
        from kit.preflight.bandwidth import measure

        results = sorted([*measure(names, rundir, port or PORT), *results], key=lambda v: v.state != "failure")
    lines = [table(results, time.monotonic() - begin), rundir.memory_after_edits() if rundir else ""]
    answer(results, "\n".join(filter(None, lines)), as_json)
    if any(result.state == "failure" for result in results):
        raise typer.Exit(1)

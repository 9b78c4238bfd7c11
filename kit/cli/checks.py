"""Commands that look for what is wrong: ``lint`` before a run, ``doctor`` after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.cli.app import app
from kit.errors import SpecError
from kit.specs import yaml


@app.command()
def lint(
    paths: Annotated[list[Path], typer.Argument(help="ds_config.json, accelerate YAML, recipe, or run directory.")],
    model: Annotated[str | None, typer.Option(help="What it trains: lets memory be judged.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Where it runs: lets batch sizes and memory be judged.")] = None,
    reader: Annotated[
        str | None, typer.Option(help="Who reads a DeepSpeed file: deepspeed, accelerate or trainer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    fix: Annotated[Path | None, typer.Option(help="Write a corrected copy of the one file here.")] = None,
) -> None:
    """What is wrong with a configuration, before a GPU is paid for. Exit code 1 where a finding is an error."""
    import json

    from kit.diagnose.lint import READERS, lint, read_values, write_fixed
    from kit.specs.catalog import load_model, parse_cluster

    if reader is not None and reader not in READERS:
        raise SpecError(f"--reader {reader!r}: {yaml.nearest(reader, list(READERS))}")
    if fix is not None and (len(paths) > 1 or paths[0].is_dir()):
        raise SpecError("--fix writes a copy of one file; name one .json or .yaml file")
    known = load_model(model) if model else None, parse_cluster(gpus) if gpus else None
    findings = [finding for path in paths for finding in lint(path, reader=reader, model=known[0], cluster=known[1])]
    if fix is not None:
        own = [finding for finding in findings if finding.file == paths[0].name]
        write_fixed(read_values(paths[0]), own, fix)
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        for finding in findings:
            typer.echo(str(finding))
        counts = [f"{sum(f.severity == s for f in findings)} {s}s" for s in ("error", "warning", "note")]
        typer.echo(", ".join(counts) + (f"; corrected copy: {fix}" if fix else ""))
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def doctor(
    logs: Annotated[list[Path], typer.Argument(help="Logs of all ranks: files, or directories of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What went wrong in a run: the cause, the rank that had it first, what to do. Exit code 1 where one is found."""
    import json

    from kit.diagnose.logs import diagnose

    causes = diagnose(logs)
    if as_json:
        typer.echo(json.dumps([cause.as_json() for cause in causes], indent=1))
    else:
        typer.echo("\n".join(str(cause) for cause in causes) if causes else "no known sign of a failure")
    if causes:
        raise typer.Exit(1)

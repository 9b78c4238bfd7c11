"""``kit lint``: errors in files, before GPUs are paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kit.addons.lint.finding import Finding
from kit.cli.options import AsJson, answer, count
from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.text import nearest, refuse

ANSWERS = {"lint": list[Finding]}
_LONGEST_SEQUENCE = 1 << 30


def command(
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

    from kit.addons.lint import READERS, lint, read_values
    from kit.addons.lint import write_fixed as write_corrected
    from kit.addons.lint.rule import markdown
    from kit.specs.catalog import load_model, parse_cluster

    if rules:
        typer.echo(markdown())
        return
    paths = paths or []
    refuse(
        {
            "nothing to read; name a ds_config.json, accelerate YAML, recipe, script or run directory": not paths,
            f"--seq-length {seq_length} should be at most {_LONGEST_SEQUENCE}": (seq_length or 0) > _LONGEST_SEQUENCE,
            "--write-fixed writes a copy of one file; name one .json or .yaml file": (
                write_fixed is not None and [path.suffix for path in paths] not in ([".json"], [".yaml"], [".yml"])
            ),
        }
    )
    if reader is not None and reader not in READERS:
        raise SpecError(f"--reader {reader!r}: {nearest(reader, list(READERS))}")
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
    answer([strict_yaml.to_plain(finding) for finding in findings], "\n".join([*map(str, findings), last]), as_json)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)
    if all({(finding.rule, finding.severity) for finding in found} == {("not-read", "warning")} for found in of_each):
        raise typer.Exit(2)

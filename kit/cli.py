"""The command line: parse, call, print. Everything it does is a function that a library user can call."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.api import plan as make_plan
from kit.errors import KitError, SpecError
from kit.planner.plan import Plan
from kit.specs import yaml
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.recipe import Recipe, load_recipe

app = typer.Typer(
    name="kit",
    help="From a model and some GPUs to a plan, the files that run it, and a trained Hugging Face model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
convert_app = typer.Typer(
    help="Between formats, offline: text to tokens, checkpoints and models to one another.", no_args_is_help=True
)
app.add_typer(convert_app, name="convert")

Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, as section.key=value.")]
OutDir = Annotated[
    Path, typer.Option("--out", "-o", help="New directory to write; an existing one is never overwritten.")
]


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Recipe file, catalog name, or Hugging Face directory.")],
    overrides: Overrides = None,
    gpus: Annotated[
        str | None, typer.Option(help="8xH100, 64xA100-80, aws:p4d.24xlarge:8 …; not with a recipe.")
    ] = None,
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    fix: Annotated[list[str] | None, typer.Option(help="Pin a choice: --fix tp=8. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences in an optimizer step.")] = None,
    total_tokens: Annotated[float | None, typer.Option(help="Token budget, for days and cost; 1e12 is fine.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this YAML file.")] = None,
) -> None:
    """What to run, whether it fits, how fast, what it costs, and why."""
    from kit.planner.render import render

    if _is_recipe(model):
        if gpus or seq_length or global_batch_size or total_tokens:
            raise SpecError(
                "a recipe names its own cluster and job; change them as words: cluster=8xH100 job.seq_length=8192"
            )
        words = [*(overrides or []), *[f"layout.{word}" for word in fix or []]]
        result = make_plan(load_recipe(model, [*words, f"layout.engine={engine}"] if engine != "auto" else words))
    else:
        if overrides:
            raise SpecError(
                f"{overrides[0]!r}: section.key=value changes a recipe; {model!r} is not a recipe file: use the options"
            )
        if gpus is None:
            raise SpecError("--gpus is missing, for example --gpus 8xH100")
        job = _job(seq_length=seq_length, global_batch_size=global_batch_size, total_tokens=total_tokens)
        result = make_plan(model, gpus, job, _pins(engine, fix or []))
    if save is not None:
        result.save(save)
    typer.echo(render(result))


@app.command()
def memory(
    model: Annotated[str, typer.Argument(help="Catalog name or Hugging Face directory.")],
    gpus: Annotated[str, typer.Option(help="8xH100, 64xA100-80, aws:p4d.24xlarge:8 …")],
    engine: Annotated[str, typer.Option(help="auto, torch, deepspeed or megatron.")] = "auto",
    fix: Annotated[list[str] | None, typer.Option(help="Pin a choice: --fix zero_stage=3. Repeatable.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences in an optimizer step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Whether it fits: peak memory of a GPU by component and pipeline stage, fitting or not."""
    import json

    from kit.planner.memory_report import memory_report, render_memory
    from kit.specs.catalog import load_model, parse_cluster

    job = _job(seq_length=seq_length, global_batch_size=global_batch_size)
    report = memory_report(load_model(model), parse_cluster(gpus), job, _pins(engine, fix or []))
    typer.echo(json.dumps(report.as_json(), indent=1) if as_json else render_memory(report))


@app.command()
def emit(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")], out: OutDir, overrides: Overrides = None
) -> None:
    """Plan a recipe and write its run directory."""
    result, loaded = _plan_recipe(recipe, overrides)
    rundir = _emit(loaded, result, out)
    typer.echo(f"{out}: {', '.join(sorted(p.name for p in rundir.path.iterdir()))}")
    typer.echo(f"start it: kit train {out}    or: {out}/launch.sh")


@app.command()
def train(
    target: Annotated[Path, typer.Argument(help="Run directory, or a recipe (then with --out).")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory to write for a recipe.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: the newest good checkpoint; or the path of a hub checkpoint.")
    ] = None,
    stop_at_step: Annotated[int | None, typer.Option(help="Stop after this step, with a checkpoint.", min=1)] = None,
) -> None:
    """Start this node's processes of a run and wait for them."""
    from kit.emit.preflight import preflight
    from kit.emit.run_directory import RunDirectory

    if _is_recipe(str(target)):
        if out is None:
            raise SpecError("--out is missing: a recipe is trained from a run directory, which is written there")
        result, loaded = _plan_recipe(target, overrides)
        rundir = _emit(loaded, result, out)
    elif overrides:
        raise SpecError(f"{overrides[0]!r}: a run directory is changed by changing its recipe and emitting again")
    else:
        rundir = RunDirectory.open(target)
    preflight(rundir, None if resume in (None, "auto") else Path(resume))
    words = ["--resume", resume if resume == "auto" else str(Path(resume).resolve())] if resume else []
    words += ["--stop-at-step", str(stop_at_step)] if stop_at_step else []
    sys.stdout.flush()
    os.environ.setdefault("PYTHON", sys.executable)
    os.execv(str(rundir.path / "launch.sh"), [str(rundir.path / "launch.sh"), *words])


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


@convert_app.command("data")
def convert_data(
    sources: Annotated[list[Path], typer.Argument(help="Text files, .jsonl files, or a saved Hugging Face data set.")],
    tokenizer: Annotated[Path, typer.Option(help="Hugging Face directory with the tokenizer.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Prefix of the .bin/.idx pair.")],
    text_key: Annotated[str, typer.Option(help="Field of jsonl rows and data sets that holds the text.")] = "text",
    objective: Annotated[
        str,
        typer.Option(help="pretrain: text. sft: jsonl of messages, or prompt and completion. seq2seq: source, target."),
    ] = "pretrain",
    seq_length: Annotated[int | None, typer.Option(help="sft, seq2seq: longer rows lose their end.", min=1)] = None,
) -> None:
    """Tokenise text, chats or pairs into the .bin/.idx pair that the engines read."""
    if objective in ("sft", "seq2seq"):
        from kit.training.data.tokenise_rows import tokenise_rows

        rows = tokenise_rows(sources, tokenizer, out, objective=objective, seq_length=seq_length)  # type: ignore[arg-type]
        typer.echo(str(rows))
        return
    if objective != "pretrain" or seq_length is not None:
        raise SpecError(
            f"--objective {objective}, --seq-length {seq_length}: use pretrain, sft or seq2seq; text is never cut"
        )
    from kit.training.data.tokenise import tokenise

    typer.echo(str(tokenise(sources, tokenizer, out, text_key=text_key)))


@convert_app.command("model")
def convert_model(
    source: Annotated[
        Path, typer.Argument(help="Hub checkpoint (RUN/checkpoints/hub-step-…), Hugging Face model, or Megatron's.")
    ],
    out: OutDir,
    to: Annotated[str, typer.Option(help="hf, hub or megatron.")] = "hf",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    extras_from: Annotated[
        Path | None, typer.Option(help="Hugging Face directory whose tokenizer is copied along.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What a Megatron checkpoint is of: Hugging Face or run directory, catalog name.")
    ] = None,
) -> None:
    """Between Hugging Face models, hub checkpoints and Megatron's, offline and a parameter at a time."""
    from kit.training.checkpoint.convert import convert

    what = convert(source, to, out, dtype=dtype, model=model, extras_from=extras_from)
    typer.echo(f"{out}: {what}")


def main() -> None:
    """Entry point: an error of the user's is one message and exit code 2, never a traceback."""
    try:
        app(standalone_mode=True)
    except KitError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise SystemExit(2) from None


def _is_recipe(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _plan_recipe(path: Path, overrides: list[str] | None) -> tuple[Plan, Recipe]:
    recipe = load_recipe(path, overrides or [])
    return make_plan(recipe), recipe


def _emit(recipe: Recipe, result: Plan, out: Path) -> Any:
    from kit.emit.run_directory import write

    if recipe.run is None:
        raise SpecError(f"{recipe.name}: run is required and missing; a run needs at least run.data.train")
    return write(result, recipe.run, out)


def _job(**values: float | None) -> JobSpec:
    """Options that were given, over the defaults."""
    given = {key: int(value) for key, value in values.items() if value is not None}
    return yaml.parse(JobSpec, given, yaml.Document(name="options", data={}, lines={}))


def _pins(engine: str, words: list[str]) -> Pins:
    """``tp=8`` words → pins, validated like the layout section of a recipe."""
    data: dict[str, Any] = {} if engine == "auto" else {"engine": engine}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SpecError(
                f"--fix {word!r} is not of the form key=value; "
                f"keys are {', '.join(field.name for field in dataclasses.fields(Pins))}"
            )
        data[key] = yaml.parse_text(f"value: {text}", f"--fix {word}").data["value"]
    return yaml.parse(Pins, data, yaml.Document(name="--fix", data={}, lines={}))

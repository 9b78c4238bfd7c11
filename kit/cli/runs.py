"""Commands that write run directories and start them: ``emit``, ``train``, ``rehearse``, ``recipes``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.cli.app import PLAIN
from kit.cli.options import (
    AsJson,
    Epochs,
    GlobalBatchSize,
    Gpus,
    Lora,
    Objective,
    Optimizer,
    OutDir,
    Overrides,
    Precision,
    Qlora,
    SeqLength,
    TotalTokens,
    answer,
    asked,
    count,
    is_recipe,
    keys_of_job,
    plan_recipe,
    searching,
    terminal,
)
from kit.errors import HINT, RunDirectoryError, SpecError
from kit.planner.length import for_run
from kit.planner.plan import Plan
from kit.specs.job import TRL
from kit.specs.recipe import Recipe
from kit.specs.text import refuse

recipes = typer.Typer(**PLAIN, help="The recipes that come with kit: list them, copy one.")


def emit(
    recipe: Annotated[Path, typer.Argument(help="Recipe file, or a saved plan.")],
    out: OutDir,
    overrides: Overrides = None,
    target: Annotated[
        list[str] | None, typer.Option(help="k8s, sky, axolotl, torchtitan …: files for these too. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a recipe and write its run directory."""
    result, loaded = plan_recipe(recipe, overrides)
    files = sorted(path.name for path in _emit(loaded, result, out, target or []).path.iterdir())
    own_loop = "launch.sh" in files
    nodes = result.cluster.num_nodes
    start = f"kit train {out}    or: {out}/launch.sh" if own_loop else f"as {out}/README.md says"
    if own_loop and nodes > 1:
        start = f"cd {out} && sbatch slurm.sbatch    or, with your hosts in {out}/hostfile: {out}/launch_hosts.sh"
        start += f"\n{nodes} nodes: {out}/README.md has every way"
    if not own_loop and result.job.objective not in TRL:
        start += " (no run.data.train: no file is for kit's own loop)"
    text = f"{out}: {', '.join(files)}\nstart it: {start}"
    answer({"directory": str(out), "files": files}, text, as_json)


def train(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help="A model (with --data); a recipe; or a run directory.", metavar="MODEL")
    ],
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Rows to train a model on: .jsonl, .parquet, .json, text, a saved data set, an id of the hub. The "
            "first row says whether they are chats, prompts with completions, pairs (source, target) or text."
        ),
    ] = None,
    gpus: Gpus = None,
    seq_length: SeqLength = None,
    global_batch_size: GlobalBatchSize = None,
    total_tokens: TotalTokens = None,
    epochs: Epochs = None,
    precision: Precision = None,
    objective: Objective = None,
    lora: Lora = False,
    qlora: Qlora = False,
    optimizer: Optimizer = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="For chats: a Jinja file, or plain, for any tokenizer; else the tokenizer's."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the run directory, and print how to start it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run directory to write; otherwise runs/MODEL-OBJECTIVE.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: the newest good checkpoint; or the path of a checkpoint or a run.")
    ] = None,
    stop_at_step: Annotated[
        int | None, typer.Option(help="Stop after this step, with a checkpoint.", parser=count)
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Trace these steps, such as 5-8, and print where their time goes.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run directory from the run that its run.lock names.")
    ] = False,
) -> None:
    """Train: a model on rows (kit train MODEL --data FILE), a recipe, or a run directory. Starts this node's processes
    and waits for them."""
    from kit.api import launch_arguments
    from kit.cli.new_recipe import free_directory
    from kit.emit.run_directory import RunDirectory, refuse_existing
    from kit.preflight.run_checks import preflight
    from kit.training.hub_files import with_local_files

    path, given = Path(target), asked(context)
    again, words = data is None and not is_recipe(target), overrides or [""]
    reasons = {
        "--data is missing: options of a cluster and a job are for kit train MODEL --data FILE; a recipe is changed by "
        "its arguments, such as job.epochs=3": data is None and (given or gpus or chat_template),
        f"--data is missing: rows are named by it: kit train {target} --data {words[0]}": (
            again and overrides and "=" not in words[0]
        ),
        f"{words[0]!r}: a run directory is changed by changing its recipe and emitting again": again and overrides,
    }
    refuse(reasons)
    if out is not None:
        refuse_existing(out)
    if data is not None:
        out, rundir = _first_run(target, gpus or "local", data, given, overrides or [], chat_template, out)
    elif is_recipe(target):
        result, loaded = plan_recipe(path, overrides)
        if result.job.objective not in TRL and (loaded.run is None or not loaded.run.data.named):
            raise SpecError(f"{loaded.name}: run.data.train is required and missing; kit's own loop trains on it")
        out = out or free_directory(loaded)
        rundir = _emit(loaded, result, out)
    else:
        rundir = RunDirectory.open(_existing(path))
        if out is not None:
            raise SpecError(f"--out {out}: {target} is a run directory and is trained where it is; omit --out")
    if dry_run:
        typer.echo(f"{out or path} is written; start it: kit train {shlex.quote(str(out or path))}")
        return
    rundir = with_local_files(rundir)
    if line := rundir.memory_after_edits():
        typer.echo(line)
    try:
        preflight(rundir, None if resume in (None, "auto") else Path(resume))
    except RunDirectoryError as error:
        if out is None:
            raise
        raise RunDirectoryError(f"{error}\n{HINT}{out} is written; once this is mended: kit train {out}") from None
    if rundir.run.data.stream is not None:
        from kit.training.data.stream import StreamSamples

        # As the ranks will: what is wrong with the sources shows before they start.
        StreamSamples(rundir.run.data, rundir.plan.job.seq_length, rundir.plan.model.vocab_size).read(0)
    args = launch_arguments(resume, stop_at_step)
    args += ["--profile", _steps(profile)] if profile else []
    args += ["--take-over"] if take_over else []
    sys.stdout.flush()
    os.environ.setdefault("PYTHON", sys.executable)
    os.execv(str(rundir.path / "launch.sh"), [str(rundir.path / "launch.sh"), *args])


def rehearse(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of one that comes with kit.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep everything in this new directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a scaled-down copy of a recipe on CPU processes: train, kill, resume, export.

    Exit code 1 if its losses, gradient norms or weights differ from plain torch's.
    """
    import tempfile

    from kit.rehearsal.rehearse import rehearse, render
    from kit.specs.shipped import recipe_path

    path = Path(recipe) if is_recipe(recipe) else recipe_path(recipe)
    if out is not None and out.exists():
        raise SpecError(f"{out} exists already and is not overwritten; choose another --out")
    planned, loaded = plan_recipe(path, overrides)
    with tempfile.TemporaryDirectory(prefix="kit-rehearsal-") as scratch:
        result = rehearse(path.stem, planned, loaded.run, out or Path(scratch) / path.stem)
    answer(result.as_json(), render(result), as_json)
    if not result.passed:
        raise typer.Exit(1)


@recipes.callback(invoke_without_command=True)
def list_where_unnamed(context: typer.Context) -> None:
    """List the recipes that come with kit."""
    if context.invoked_subcommand is None:
        list_recipes()


@recipes.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List every recipe and its purpose."""
    from kit.specs.shipped import shipped_recipes

    found = shipped_recipes()
    answer(found, "\n".join(f"{recipe.name}\n    {recipe.purpose}" for recipe in found), as_json)


@recipes.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Recipe, as kit recipes list shows it.")],
    directory: Annotated[Path, typer.Argument(help="New directory; an existing one is never overwritten.")],
) -> None:
    """Write a directory to run from: the recipe, its run directory, and a README with the commands."""
    from kit.emit.copy_recipe import copy_recipe

    made = copy_recipe(name, directory)
    typer.echo(f"{made}: {', '.join(sorted(path.name for path in made.iterdir()))}; read README.md")


def _steps(text: str) -> str:
    """The text, if it is a range of steps. Raises SpecError otherwise."""
    from argparse import ArgumentTypeError

    from kit.training.__main__ import steps_range

    try:
        steps_range(text)
    except ArgumentTypeError as error:
        raise SpecError(f"--profile: {error}") from None
    return text


def _existing(path: Path) -> Path:
    """The path, if there may be a run directory. Raises SpecError for what may be meant as a model."""
    if not path.exists() or ((path / "config.json").is_file() and not (path / "manifest.json").exists()):
        raise SpecError(f"{path} is not a run directory; a model trains on rows: kit train {path} --data FILE.jsonl")
    return path


def _first_run(
    model: str,
    gpus: str,
    data: str,
    given: dict[str, Any],
    overrides: list[str],
    chat_template: str | None,
    out: Path | None,
) -> tuple[Path, Any]:
    """Write the run directory of a model on rows; print its plan. Returns the path as it was typed, and the run
    directory."""
    from kit.cli.new_recipe import free_directory, new_recipe, with_batch_for
    from kit.emit.of_recipe import plan_of_recipe
    from kit.emit.run_directory import write
    from kit.report.summary import summary
    from kit.report.view import view_of
    from kit.training.data.prepared import prepared, samples_of

    made = new_recipe(model, gpus, data, keys_of_job(**given), overrides, chat_template)
    plan_of_recipe(made.recipe)  # what cannot be planned is not tokenised
    out = out or free_directory(made.recipe)
    assert made.recipe.run is not None
    run = prepared(made.recipe.run, made.recipe.job, out.parent, typer.echo)
    made = with_batch_for(made, samples_of(run.data, made.recipe.job))
    with searching(f"{made.recipe.model.name} on {made.recipe.cluster.name}"):
        plan = for_run(plan_of_recipe(made.recipe), run)
    width, style = terminal()
    typer.echo(f"\n{summary(view_of(plan), width=width, style=style)}\n")
    return out, write(plan, run, out, beside={"recipe.yaml": made.text(out)})


def _emit(recipe: Recipe, result: Plan, out: Path, targets: Sequence[str] = ()) -> Any:
    from kit.emit.run_directory import write
    from kit.specs.run import RunSpec
    from kit.training.data.prepared import prepared

    run = prepared(recipe.run or RunSpec(), result.job, out.parent, lambda line: typer.echo(line, err=True))
    return write(for_run(result, run), run, out, targets)

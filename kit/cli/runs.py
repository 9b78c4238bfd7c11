"""Commands that write run directories and start them: ``emit``, ``train``, ``rehearse``, ``recipes``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.cli.app import PLAIN
from kit.cli.options import AsJson, Overrides, answer, count, is_recipe, plan_recipe
from kit.errors import HINT, RunDirectoryError, SpecError
from kit.planner.plan import Plan
from kit.specs.recipe import Recipe
from kit.specs.trl import TRL

recipes = typer.Typer(**PLAIN, help="The recipes that come with kit: list them, copy one.")


def emit(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe file, or a saved plan.")] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New run directory; an existing one is never overwritten.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="k8s, sky, axolotl, torchtitan …: files for these too. Repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare ds_configs/ and launch/ of this checkout with its recipes.")
    ] = False,
    write_shipped: Annotated[bool, typer.Option(help="Regenerate ds_configs/ and launch/.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a recipe and write its run directory."""
    if check or write_shipped:
        if recipe or overrides or out or target or as_json or (check and write_shipped):
            raise SpecError("kit emit --check and kit emit --write-shipped take no other argument")
        _shipped(write=write_shipped)
        return
    if recipe is None or out is None:
        raise SpecError("kit emit needs a recipe and --out NEW_DIRECTORY")
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
    target: Annotated[Path, typer.Argument(help="Run directory, or a recipe (with --out).")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory to write for a recipe.")] = None,
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
    """Start this node's processes of a run and wait for them."""
    from kit.api import launch_arguments
    from kit.emit.run_directory import RunDirectory
    from kit.preflight.run_checks import preflight
    from kit.training.hub_files import with_local_files

    if is_recipe(str(target)):
        if out is None:
            raise SpecError("--out is missing: a recipe is trained from a run directory, which is written there")
        result, loaded = plan_recipe(target, overrides)
        if result.job.objective not in TRL and (loaded.run is None or not loaded.run.data.named):
            raise SpecError(f"{loaded.name}: run.data.train is required and missing; kit's own loop trains on it")
        rundir = _emit(loaded, result, out)
    elif overrides:
        raise SpecError(f"{overrides[0]!r}: a run directory is changed by changing its recipe and emitting again")
    else:
        rundir = RunDirectory.open(target)
        if out is not None:
            raise SpecError(f"--out {out}: {target} is a run directory and is trained where it is; omit --out")
    rundir = with_local_files(rundir)
    if line := rundir.memory_after_edits():
        typer.echo(line)
    try:
        preflight(rundir, None if resume in (None, "auto") else Path(resume))
    except RunDirectoryError as error:
        if not is_recipe(str(target)):
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


def _emit(recipe: Recipe, result: Plan, out: Path, targets: Sequence[str] = ()) -> Any:
    from kit.emit.run_directory import write
    from kit.specs.run import RunSpec

    return write(result, recipe.run or RunSpec(), out, targets)


def _shipped(write: bool) -> None:
    """Write or compare ``ds_configs/`` and ``launch/`` of the checkout that the recipes come from."""
    from kit.emit import shipped_files
    from kit.specs.shipped import recipes_directory

    root = recipes_directory().parent
    lines = shipped_files.write_shipped(root) if write else shipped_files.check(root)
    for line in lines:
        typer.echo(line)
    typer.echo(f"{len(lines)} files {'written or removed' if write else 'differ'}")
    if lines and not write:
        raise typer.Exit(1)

"""``kit recipes copy``: copies a shipped recipe, with all its files, to a new directory."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from kit.emit.markdown import code
from kit.emit.of_recipe import plan_of_recipe
from kit.emit.readme import launched
from kit.emit.run_directory import write as write_run
from kit.emit.trl import trl_arguments, words
from kit.errors import RunDirectoryError
from kit.files import complete_directory
from kit.planner.plan import Plan
from kit.specs.job import TRL, Objective
from kit.specs.recipe import Recipe, load_recipe, merged_text
from kit.specs.run import RunSpec, run_paths
from kit.specs.shipped import example_script, headline, recipe_path

_TRL_DATA = {
    "trl_dpo.py": "preferences",
    "trl_reward.py": "preferences",
    "trl_kto.py": "answers",
    "trl_grpo.py": "prompts",
}
"""Script → its argument that names the rows."""


def copy_recipe(name: str, target: Path) -> Path:
    """Write ``recipe.yaml`` (complete: what it extended is in it), ``run/`` (its files, and the script that they are
    for, where that is not kit's own loop) and ``README.md``.

    Complete or absent. Raises ``SpecError`` for an unknown name, ``RunDirectoryError`` where the target exists, and
    ``PlanError`` where the recipe has no plan.
    """
    source = recipe_path(name)
    if target.exists():
        raise RunDirectoryError(f"{target} exists already and is not overwritten; choose another directory")
    try:
        with complete_directory(target) as staging:
            todo = f"# A copy of kit's {source.stem}: change it, then kit emit recipe.yaml --out run2\n"
            text = f"# {headline(source)}\n{todo}{merged_text(source)}"
            (staging / "recipe.yaml").write_text(text, encoding="utf-8")
            recipe = load_recipe(staging / "recipe.yaml")
            plan = plan_of_recipe(recipe)
            needed = _paths(recipe.run, staging) if recipe.run is not None else []
            if recipe.run is not None:
                write_run(plan, recipe.run, staging / "run")
            script = example_script(name)
            if script is not None:
                shutil.copyfile(script, staging / "run" / script.name)
            page = _page(source.stem, headline(source), recipe, needed, None if script is None else (script.name, plan))
            (staging / "README.md").write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{target} cannot be written: {error.strerror}") from None
    return target


def _paths(run: RunSpec, directory: Path) -> list[str]:
    """Paths that must exist before the run starts, as written in the recipe."""
    base = directory.resolve()
    paths = set(run_paths(run).values())
    return sorted(os.path.relpath(path, base) if Path(path).is_relative_to(base) else path for path in paths)


def _place(recipe: Recipe) -> str:
    """Path of the model and its tokenizer, relative to the copied directory."""
    model_path = None if recipe.run is None else recipe.run.model_path
    return "models/NAME" if model_path is None else f"models/{Path(model_path).name}"


def _by_hand(script: str, recipe: Recipe, plan: Plan) -> str:
    """The command that starts TRL's script with the plan's files."""
    data = "--chats ../data/chats.jsonl"
    if (kind := _TRL_DATA.get(script)) is not None:
        data = f"--{kind} ../data/{kind}.jsonl"
    own = f"--model {shlex.quote(f'../{_place(recipe)}')} {data} --output_dir out"
    return "cd run && " + launched(plan, "accelerate.yaml", f"{script} {own} {shlex.join(words(trl_arguments(plan)))}")


def _page(name: str, line: str, recipe: Recipe, needed: list[str], script: tuple[str, Plan] | None) -> str:
    several = recipe.cluster.num_nodes > 1
    start = (
        "cd run && sbatch slurm.sbatch                      # Slurm; or on each node by hand:\n"
        "cd run && NODE_RANK=0 MASTER_ADDR=node-0 ./launch.sh"
        if several
        else "kit train run                                      # or: run/launch.sh"
    )
    objective = recipe.job.objective
    source = "text/*.jsonl" if objective == "pretrain" else "rows/*.jsonl"
    convert = convert_data(objective, source, _place(recipe), "data/train")
    needs = "\n".join(f"- {code(path)}" for path in needed)
    own = ""
    if script is not None:
        own = f"With TRL's trainer:\n\n```\n{_by_hand(script[0], recipe, script[1])}\n```\n\n"
        if objective in TRL:
            after = "`recipe.yaml` is yours to change; then `kit emit recipe.yaml --out run2`."
            return f"# {name}\n\n{line}\n\n{own}{after}\n"
        own += "With kit's own loop:\n\n"
    return f"""# {name}

{line}

`recipe.yaml` is yours to change; `run/` holds the files that follow from it. Relative paths are relative to here.

It needs, here or where you point it:

{needs}

{own}```
{convert}      # once, and the same for data/validation
kit plan recipe.yaml                                # what it will do; kit explain says why
{start}
kit train run --resume auto                         # after an interruption
kit emit recipe.yaml --out run2                     # after a change: a new run directory
kit convert model run/checkpoints/step-N --out trained
```
"""


def convert_data(objective: Objective, source: str, tokenizer: str, out: str) -> str:
    """The command that tokenises data for an objective. ``source``: a shell word, which may be a pattern."""
    rows = [] if objective == "pretrain" else ["--objective", objective]
    return f"kit convert data {source} {shlex.join(['--tokenizer', tokenizer, *rows, '--out', out])}"

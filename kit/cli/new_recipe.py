"""The recipe that ``kit train MODEL --data FILE`` stands for: what the options say, and what is usual for the rest."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog.models import weights_of
from kit.specs.job_defaults import defaults_of
from kit.specs.recipe import Recipe, recipe_of_data
from kit.specs.run import RunSpec, run_paths, with_paths

LEAST_STEPS = 25
"""Optimizer steps of an epoch below which the usual batch is halved. 1,000 rows then take 32 a step, as LIMA did (arXiv
2305.11206), 200 take 8, and from 3,200 on nothing changes."""
_SHOWN = ("objective", "seq_length", "global_batch_size", "learning_rate", "epochs")
"""Keys of the job that the recipe shows, also where they are what is usual: they are the first that people change."""


@dataclasses.dataclass(frozen=True)
class NewRecipe:
    """A recipe that no file has yet."""

    recipe: Recipe
    keys: Mapping[str, Any]

    def text(self, directory: Path) -> str:
        """The file in ``directory``, with paths relative to it where they were."""
        run, job = self.recipe.run or RunSpec(), strict_yaml.to_plain(self.recipe.job)
        moved = {key: os.path.relpath(path, directory.resolve()) for key, path in run_paths(run).items()}
        own = _beyond(strict_yaml.to_plain(with_paths(run, moved)), strict_yaml.to_plain(RunSpec()))
        given = self.keys.get("job") or {}
        shown = {key: job[key] for key in (*_SHOWN, *given) if job[key] is not None}
        data = {**self.keys, "job": {**shown, **given}, "run": own}
        for key in ("model", "cluster"):
            if os.path.exists(data[key]):
                data[key] = os.path.relpath(data[key], directory.resolve())
        return "# Change it, then: kit train recipe.yaml --out NEW_DIRECTORY\n" + strict_yaml.dump(data)


def new_recipe(
    model: str,
    gpus: str,
    data: str,
    job: Mapping[str, Any],
    overrides: Sequence[str],
    chat_template: str | None = None,
) -> NewRecipe:
    """The recipe. ``data``: a source of rows; ``job``: keys of the job that options gave. The objective is that of the
    first row, unless it is given. Raises KitError."""
    from kit.training.data.prepared import objective_of
    from kit.training.data.sources import DATA_SETS
    from kit.training.hub_files import is_data_set

    if is_data_set(data) and not os.path.lexists(data):
        data = f"{DATA_SETS}{data}"
    job = {"objective": objective_of(data), **job} if "objective" not in job else dict(job)
    of_data = {"train": data} | ({} if chat_template is None else {"chat_template": chat_template})
    if (weights := weights_of(model)) is None:
        raise SpecError(f"{model} has no weights to start from; name a directory or an id of the hub (Qwen/Qwen3-8B)")
    keys = {"model": model, "cluster": gpus, "job": job, "run": {"model_path": weights, "data": of_data}}
    return _made(keys, overrides, Path(model).name)


def with_batch_for(made: NewRecipe, samples: int) -> NewRecipe:
    """The recipe with a smaller batch where so few samples would make hardly a step; what was given stays."""
    job, gpus = made.recipe.job, made.recipe.cluster.num_gpus
    batch = job.global_batch_size
    while batch > gpus and batch * LEAST_STEPS > samples:
        batch //= 2
    if batch == job.global_batch_size or "global_batch_size" in made.keys["job"]:
        return made
    return _made(made.keys, [f"job.global_batch_size={batch}"], made.recipe.name)


def _made(keys: Mapping[str, Any], overrides: Sequence[str], name: str) -> NewRecipe:
    """The recipe, with its length in words."""
    recipe, said = recipe_of_data(dict(keys), overrides, name, Path())
    if recipe.job.epochs is None and recipe.job.total_tokens is None and recipe.run and recipe.run.steps is None:
        usual = defaults_of(recipe.job.objective, recipe.job.lora is not None).epochs
        return _made(said, [f"job.epochs={usual}"], name)
    return NewRecipe(recipe, said)


def free_directory(recipe: Recipe) -> Path:
    """runs/MODEL-OBJECTIVE, or the first number of it that is free."""
    stem = f"runs/{recipe.model.name}-{recipe.job.objective}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(path for path in map(Path, names) if not path.exists())


def _beyond(value: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose value is not the usual one."""
    return {
        key: _beyond(each, usual[key]) if isinstance(each, dict) and usual.get(key) else each
        for key, each in value.items()
        if each != usual.get(key)
    }

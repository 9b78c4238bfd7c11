"""What several commands read from their words: recipes with changes, jobs, pinned choices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.api import plan as make_plan
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from kit.specs.recipe import Recipe, load_recipe

Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to the recipe, as section.key=value.")]
OutDir = Annotated[
    Path, typer.Option("--out", "-o", help="New directory to write; an existing one is never overwritten.")
]


def is_recipe(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def plan_recipe(path: Path, overrides: list[str] | None) -> tuple[Plan, Recipe]:
    recipe = load_recipe(path, overrides or [])
    return make_plan(recipe), recipe


def job_for(model: ModelSpec, **values: float | str | None) -> JobSpec:
    """Options that were given, over the defaults: of a job, and where those cannot be, of the model."""
    defaults: dict[str, Any] = {}
    if model.max_position_embeddings < JobSpec().seq_length:
        defaults["seq_length"] = model.max_position_embeddings
    if model.is_encoder_decoder:
        defaults["objective"] = "seq2seq"
    given = {
        key: int(value) if isinstance(value, float) else value for key, value in values.items() if value is not None
    }
    return strict_yaml.parse(JobSpec, defaults | given, strict_yaml.Document(name="options", data={}, lines={}))


def pins_of(engine: str, words: list[str]) -> Pins:
    """``tp=8`` words → pins, validated like the layout section of a recipe."""
    data: dict[str, Any] = {} if engine == "auto" else {"engine": engine}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SpecError(
                f"--fix {word!r} is not of the form key=value; "
                f"keys are {', '.join(field.name for field in dataclasses.fields(Pins))}"
            )
        if key == "engine" and engine not in ("auto", text):
            raise SpecError(f"--engine {engine} and --fix {word} name two engines; leave one of them out")
        data[key] = strict_yaml.parse_text(f"value: {text}", f"--fix {word}").data["value"]
    return strict_yaml.parse(Pins, data, strict_yaml.Document(name="--fix", data={}, lines={}))

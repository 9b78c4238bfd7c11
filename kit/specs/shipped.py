"""The recipes that come with kit: in a checkout beside the package, in an installed wheel inside it (setup.py)."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from kit.errors import SpecError
from kit.specs.text import nearest


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with kit."""

    name: str
    purpose: str


def recipes_directory() -> Path:
    """Directory of the recipes. Raises ``SpecError`` for an installation without them."""
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "recipes", package.parent / "recipes"):
        if (directory / "recipe.schema.json").is_file():
            return directory
    raise SpecError("this installation of kit has no recipes; install it again, or take them from its repository")


def example_script(name: str) -> Path | None:
    """The script of ``examples/`` that the recipe's files are for, where its head names one."""
    named = re.search(r"examples/(\w+\.py)", headline(recipe_path(name)))
    if named is None:
        return None
    directory = recipes_directory()
    return next(p for p in (directory / named[1], directory.parent / "examples" / named[1]) if p.is_file())


def recipe_names() -> tuple[str, ...]:
    """Names of all recipes, sorted."""
    return tuple(sorted(path.stem for path in recipes_directory().glob("*.yaml")))


def shipped_recipes() -> list[ShippedRecipe]:
    """All of them, by name."""
    return [ShippedRecipe(name, headline(recipe_path(name))) for name in recipe_names()]


def recipe_path(name: str) -> Path:
    """The file of a recipe. Raises ``SpecError`` with the nearest names."""
    names = recipe_names()
    plain = name.removesuffix(".yaml")
    if plain not in names:
        raise SpecError(f"recipe {name!r} does not come with kit; {nearest(plain, list(names))}")
    return recipes_directory() / f"{plain}.yaml"


def headline(path: Path) -> str:
    """The comment at the head of a recipe, as one line."""
    head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in head)

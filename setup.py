"""Takes the recipes, and the scripts that some are for, into a wheel, so that ``kit recipes`` works without a checkout;
the rest is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    """Copies ``recipes/`` and ``examples/`` to ``kit/recipes/``; an editable install reads them where they are
    (kit/specs/shipped.py)."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "kit" / "recipes"
            target.mkdir(parents=True, exist_ok=True)
            recipes = (*Path("recipes").glob("*.yaml"), Path("recipes/recipe.schema.json"))
            for path in (*recipes, *Path("examples").glob("*.py")):
                shutil.copyfile(path, target / path.name)


setup(cmdclass={"build_py": WithRecipes})

"""What a generator writes and git keeps is what the generator writes today. It catches no bug: whoever writes the files
again accepts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from scripts import compile_catalog, readme, recipe_schema, shipped_files
from tests.support import ROOT
from tests.system import versions

TABLES = ("launcher_options", "accelerate_keys", "deepspeed_keys", "layer_classes", "trainer_arguments")
WRITE_TABLES = """
import contextlib, io, json, runpy, sys
written, tables = {}, sys.argv[1:]
del sys.argv[1:]
for table in tables:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        runpy.run_path(f"scripts/{table}.py", run_name="__main__")
    written[f"kit/addons/lint/{table}.yaml"] = stream.getvalue()
print(json.dumps(written))
"""


def other(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if (ROOT / name).read_text(encoding="utf-8") != text]


def printed(*words: str) -> str:
    """What a program writes, in a process of its own: some import engines."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def shipped() -> list[str]:
    if sys.version_info >= (3, 12):
        pytest.skip("Python 3.12 sums floats with compensation: other last digits in plan.yaml")
    return shipped_files.check(ROOT)


WRITERS: dict[str, Callable[[], list[str]]] = {
    "python -m scripts.shipped_files": shipped,
    "python scripts/readme.py": lambda: other(
        {str(page.relative_to(ROOT)): readme.refreshed(page.read_text(encoding="utf-8")) for page in readme.pages()}
    ),
    "python scripts/compile_catalog.py": lambda: other({"kit/specs/catalog/catalog.json": compile_catalog.compiled()}),
    "python scripts/recipe_schema.py > recipes/recipe.schema.json": lambda: other(
        {"recipes/recipe.schema.json": json.dumps(recipe_schema.json_schema(), indent=2) + "\n"}
    ),
    "python scripts/TABLE.py > kit/addons/lint/TABLE.yaml": lambda: other(
        json.loads(printed("-c", WRITE_TABLES, *TABLES).splitlines()[-1])
    ),
    "python scripts/lint_corpus.py > tests/addons/corpus/expected.yaml": lambda: other(
        {"tests/addons/corpus/expected.yaml": printed("scripts/lint_corpus.py")}
    ),
    "python -m tests.system.versions": lambda: other(
        {versions.SECTION.page: versions.SECTION.updated((ROOT / versions.SECTION.page).read_text(encoding="utf-8"))}
    ),
}


@pytest.mark.everyday(*(name for name in WRITERS if "TABLE" not in name and "corpus" not in name))
@pytest.mark.parametrize("command", WRITERS)
def test_generated_files_are_todays(command: str) -> None:
    assert WRITERS[command]() == [], f"run: {command}"

"""Everything left of the engines works on a machine without torch, and dependencies run one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).parents[2] / "kit"
ORDER = [
    "specs",
    "cost",
    "planner",
    "report",
    "emit",
    "preflight",
    "engines",
    "training",
    "rehearsal",
    "cli",
    "addons",
]
"""A package imports those before it, and no other."""
WITHOUT_TORCH = ORDER[: ORDER.index("engines")]
BLOCKED = ["torch", "transformers", "deepspeed", "megatron", "numpy", "accelerate", "safetensors"]

PROGRAM = f"""
import importlib, importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
print(make_plan(load_model("llama-3-8b"), parse_cluster("8xH100"), JobSpec()).layout.engine)
"""


def modules(package: str) -> list[str]:
    places = (file.relative_to(KIT.parent).with_suffix("") for file in sorted((KIT / package).rglob("*.py")))
    return [".".join(place.parts).removesuffix(".__init__") for place in places]


def test_planning_needs_no_torch() -> None:
    names = [name for package in WITHOUT_TORCH for name in modules(package)] + ["kit", "kit.api", "kit.cli"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, cwd=KIT.parent, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("torch", "deepspeed", "megatron")


@pytest.mark.parametrize("package", ORDER)
@pytest.mark.slow
def test_imports_run_one_way(package: str) -> None:
    later = {*ORDER[ORDER.index(package) + 1 :], *(["api"] if package in WITHOUT_TORCH else [])}
    assert [
        f"{file.name}: {name}"
        for file in (KIT / package).rglob("*.py")
        for name in imported(file)
        if name.startswith("kit.") and name.split(".")[1] in later
    ] == []


def test_every_package_has_a_place() -> None:
    assert sorted(path.parent.name for path in KIT.glob("*/__init__.py")) == sorted(ORDER)


def imported(file: Path) -> list[str]:
    """Dotted names: of modules, or of what is taken from them."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names] + [
        f"{node.module}.{alias.name}" for node in taken for alias in node.names
    ]

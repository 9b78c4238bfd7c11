"""Everything left of the engines works on a machine without torch, and dependencies run one way."""

from __future__ import annotations

import ast
import graphlib
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
KNOWN_CIRCLES = {
    "kit.training.anomalies.handler": {"kit.training.loop"},
    "kit.training.finalize": {"kit.training.loop"},
}
"""Module → imports that close a circle: to be cut, never to be added to."""
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
    return [module_name(file) for file in sorted((KIT / package).rglob("*.py"))]


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
    wrong = [
        f"{file.name}: {name}"
        for file in (KIT / package).rglob("*.py")
        for name in imported(file)
        if name.startswith("kit.") and name.split(".")[1] in later
    ]
    assert wrong == []


def test_every_package_has_a_place() -> None:
    assert sorted(path.parent.name for path in KIT.glob("*/__init__.py")) == sorted(ORDER)


@pytest.mark.slow
def test_no_circle_between_modules() -> None:
    """Lazy imports and those for types alone count too, but for the ones that are known."""
    files = {module_name(file): file for file in KIT.rglob("*.py")}
    graph = {
        name: {found if found in files else found.rpartition(".")[0] for found in imported(file)}
        for name, file in files.items()
    }
    for name, circle in KNOWN_CIRCLES.items():
        graph[name] -= circle
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(KIT.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> list[str]:
    """Dotted names: of modules, or of what is taken from them."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names

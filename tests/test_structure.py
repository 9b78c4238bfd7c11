"""The structure of kit, held where it is: a number may fall, and its limit here with it, but not rise."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.measure import ROOT, Checkout

LIMITS = {
    "import circles of modules": (Checkout.module_circles, 0),
    "import circles of packages": (Checkout.package_circles, 0),
    "public names twice in a room": (Checkout.names_twice, 0),
    "functions that take model, cluster, job and layout": (Checkout.quadruples, 0),
    "imports between tests and benchmarks": (Checkout.crossings, 0),
    "modules that a worker imports": (Checkout.of_a_worker, 103),
    "renames, flushes and locks beside kit/files.py": (Checkout.durable_writes, 5),
    "trainings in tests": (Checkout.trainings, 79),
}
"""What is counted, and how many there may be."""
STATEMENTS = {"core": 17_500, "add-ons": 5_770, "tests": 17_500, "benchmarks": 3_992}
"""Without imports and docstrings. A limit rises only with a line in docs/architecture.md that says what a user got."""
CHECKPOINTS = (
    "kit/training/checkpoint/",
    "kit/engines/io/",
    "kit/engines/full_tensors.py",
    "kit/engines/moments.py",
)
"""The files of kit's own checkpoint: written, found, read, copied to object storage, exported."""
IMPORTERS = {"formats"}
"""Files of kit.training.checkpoint for other programs' formats, which count with the importers."""


@pytest.fixture(scope="module")
def checkout() -> Checkout:
    """Not while tests are collected, which each process does; a million nodes are let go of at the file's end."""
    return Checkout(ROOT)


@pytest.mark.parametrize("what", LIMITS)
def test_a_count_does_not_rise(checkout: Checkout, what: str) -> None:
    listed, limit = LIMITS[what]
    found = listed(checkout)
    assert len(found) <= limit, f"{what}: {found}"


def test_statements_do_not_rise(checkout: Checkout) -> None:
    found = dict.fromkeys(STATEMENTS, 0)
    for room, (_, _, statements) in checkout.sizes().items():
        package = room.split("/")[0]
        part = "add-ons" if room.startswith("kit/addons") else "core" if package == "kit" else package
        found[part] += statements
    assert {part: count for part, count in found.items() if count > STATEMENTS[part]} == {}


def test_one_checkpoint_stays_small(checkout: Checkout) -> None:
    own = [name for name in checkout.trees if name.startswith(CHECKPOINTS) and Path(name).stem not in IMPORTERS]
    assert sum(map(checkout.statements, own)) <= 1_100


def test_files_and_floors_of_the_cost_model(checkout: Checkout) -> None:
    """Files, and files on the longest path of imports inside of it."""
    assert sum(name.startswith("kit/cost/") for name in checkout.trees) <= 30
    assert 0 < checkout.floors() <= 6


@pytest.mark.everyday("plan")
@pytest.mark.parametrize(
    ("words", "files", "returns"),
    [("plan llama-3.1-8b --gpus 8xH100", 55, 13), ("convert model {run}/checkpoints/step-00000006 --out {out}", 33, 9)],
    ids=["plan", "convert"],
)
def test_a_walk_does_not_grow(
    checkout: Checkout, golden_run: Callable[[str], Path], tmp_path: Path, words: str, files: int, returns: int
) -> None:
    """Files whose functions a command calls, and first calls that go back into a package that was left."""
    run = golden_run("torch") if "{run}" in words else None
    found = checkout.walk(*words.format(run=run, out=tmp_path / "out").split())
    assert (found["files"] <= files, found["returns"] <= returns) == (True, True), found


def test_a_package_says_which_rooms_it_has(checkout: Checkout) -> None:
    """In its docstring, each once, in indented lines before two spaces."""
    for package in (package for package, rooms in checkout.rooms().items() if len(rooms) > 1):
        text = ast.get_docstring(checkout.trees[f"{package}/__init__.py"], clean=False) or ""
        lines = re.findall(r"^    (\w[\w, ]*?)(?:  .*)?$", text, re.MULTILINE)
        assert sorted(name for line in lines for name in line.split(", ")) == sorted(checkout.rooms()[package]), package

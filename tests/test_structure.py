"""The structure of kit, held where it is: a number may fall, and its limit here with it, but not rise."""

from __future__ import annotations

import ast
import re

import pytest

from scripts.measure import ROOT, Checkout

CHECKOUT = Checkout(ROOT)
LIMITS = {
    "import circles of modules": (CHECKOUT.module_circles, 0),
    "import circles of packages": (CHECKOUT.package_circles, 0),
    "public names twice in a room": (CHECKOUT.names_twice, 0),
    "functions that take model, cluster, job and layout": (CHECKOUT.quadruples, 0),
    "imports between tests and benchmarks": (CHECKOUT.crossings, 0),
    "trainings in tests": (CHECKOUT.trainings, 82),
}
"""What is counted, and how many there may be."""
STATEMENTS = {"core": 18_050, "add-ons": 5_100, "tests": 17_700, "benchmarks": 4_000}
"""Without imports and docstrings. A limit rises only with a line in docs/architecture.md that says what a user got."""


@pytest.mark.parametrize("what", LIMITS)
def test_a_count_does_not_rise(what: str) -> None:
    listed, limit = LIMITS[what]
    found = listed()
    assert len(found) <= limit, f"{what}: {found}"


def test_statements_do_not_rise() -> None:
    found = dict.fromkeys(STATEMENTS, 0)
    for room, (_, _, statements) in CHECKOUT.sizes().items():
        package = room.split("/")[0]
        part = "add-ons" if room.startswith("kit/addons") else "core" if package == "kit" else package
        found[part] += statements
    assert {part: count for part, count in found.items() if count > STATEMENTS[part]} == {}


def test_files_and_floors_of_the_cost_model() -> None:
    """Files, and files on the longest path of imports inside of it."""
    assert sum(name.startswith("kit/cost/") for name in CHECKOUT.trees) <= 33
    assert 0 < CHECKOUT.floors() <= 6


@pytest.mark.parametrize("package", [package for package, rooms in CHECKOUT.rooms().items() if len(rooms) >= 10])
def test_a_package_says_which_rooms_it_has(package: str) -> None:
    """In its docstring, each once, in indented lines before two spaces."""
    tree = CHECKOUT.trees[f"{package}/__init__.py"]
    lines = re.findall(r"^    (\w[\w, ]*?)(?:  .*)?$", ast.get_docstring(tree, clean=False) or "", re.MULTILINE)
    assert sorted(name for line in lines for name in line.split(", ")) == sorted(CHECKOUT.rooms()[package])

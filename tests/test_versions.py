"""The tested versions (kit/preflight/versions.json): who reads them, and what is said of others."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from kit.addons.doctor.machines.facts import gather
from kit.preflight.versions import LEGS, NEWEST, OLDEST, check_versions
from scripts.leg import pins
from tests.support import ROOT

BOUNDS = (
    {"torch": "2.9.1", "transformers": "5.23.0", "deepspeed": "0.19.8"},
    {"torch": "2.13.0", "transformers": "5.24.0", "deepspeed": "0.19.8"},
)
LIBRARIES = ("torch", "transformers", "deepspeed", "megatron")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("here", "state", "said"),
    [
        ({}, None, ""),
        ({"torch": "2.13.7+cpu", "transformers": "5.23.0", "deepspeed": "0.19.3", "another": "0.1"}, None, ""),
        ({"torch": "2.9.0"}, None, ""),
        ({"torch": "2.14.0"}, "warning", "torch 2.14.0 is installed and kit is tested with 2.9.1 to 2.13.0"),
        ({"torch": "3.0"}, "warning", "torch 3.0 is"),
        ({"torch": "2.8.9"}, "failure", "torch 2.8.9 is"),
        ({"transformers": "4.57.3"}, "failure", "transformers 4.57.3 is"),
        ({"deepspeed": "0.18.9"}, "warning", "deepspeed 0.18.9 is installed and kit is tested with 0.19.8"),
        ({"deepspeed": "0.20.0", "torch": "2.10"}, "warning", "deepspeed 0.20.0 is"),
    ],
)  # fmt: skip
def test_versions_outside_the_tested_ranges_are_named(here: dict[str, str], state: str | None, said: str) -> None:
    result = check_versions(here.get, *BOUNDS)
    assert (result.state if result else None) == state
    if result:
        assert result.said.startswith(said)
        assert "\n" not in result.said + result.fix
        outside = [name for name in here if f"{name} {here[name]} is" in result.said]
        bounds = [f"'{name}>={BOUNDS[0][name]},<={BOUNDS[1][name]}'" for name in outside]
        assert result.fix == f"pip install {' '.join(bounds)}; without a network: docs/gpu.md"


def test_what_is_installed_here_was_tested_and_the_doctor_asks_for_every_package() -> None:
    assert check_versions() is None
    assert NEWEST.keys() <= gather({})["packages"].keys()
    assert OLDEST | LEGS["oldest"]["packages"] == OLDEST
    assert LEGS["newest"]["packages"] == NEWEST


def test_ranges_of_the_project_end_where_the_legs_end() -> None:
    """A minor version above the newest leg is refused by pip, the oldest leg is the lower bound; transformers and
    accelerate keep their promises within a major version."""
    required = {each.name: each.specifier for extra in EXTRAS.values() for each in map(Requirement, extra)}
    for name, newest in NEWEST.items():
        oldest = OLDEST[name]
        major, minor = map(int, re.findall(r"\d+", newest)[:2])
        assert {oldest, newest} <= set(required[name].filter([oldest, newest])), name
        assert not required[name].contains(f"{major + 1}.0" if name in ("transformers", "accelerate") else
                                           f"{major}.{minor + 1}"), name  # fmt: skip
        below = f"{re.match(r'.*?(?=[.]0$|$)', oldest)[0]}"  # type: ignore[index]
        assert f">={below}" in str(required[name]), name


def test_both_legs_take_their_versions_from_the_file() -> None:
    """``make setup`` and CI's main leg read the same lines, of which constraints.txt has those of main."""
    assert {*pins("main")} <= {*(ROOT / "constraints.txt").read_text().splitlines()}
    for leg, row in LEGS.items():
        assert {f"{name}=={each}" for name, each in row["packages"].items()} <= {*pins(leg)}
        assert len({line.partition("==")[0] for line in pins(leg)}) == len(pins(leg))


def test_no_leg_failed() -> None:
    assert all(row["tested"]["passed"] > 0 == row["tested"]["failed"] for row in LEGS.values())
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yaml").read_text())["jobs"]["leg"]["strategy"]
    named = {each["leg"]: each["python"] for each in nightly["matrix"]["include"]}
    assert named == {leg: row["python"] for leg, row in LEGS.items() if leg != "main"}


def private_words() -> set[str]:
    """Words with an underscore that kit takes from the libraries: imported, read as an attribute, or in a dotted path.
    An attribute that kit gives to something of its own does not count."""
    own, read, named = {"_exit", "_make"}, set(), set()  # of os and of named tuples
    for path in (ROOT / "kit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
                    own.add(word)
                case ast.Attribute(attr=word, ctx=ast.Store()) | ast.Name(id=word, ctx=ast.Store()):
                    own.add(word)
                case ast.Attribute(attr=word):
                    read.add(word)
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in LIBRARIES:
                    named |= {*module.split("."), *(each.name for each in node.names)}
                case ast.Constant(value=str(text)) if text.split(".")[0] in LIBRARIES:
                    named |= {*text.split(".")}
    return {word for word in read - own | named if re.fullmatch(r"_[a-zA-Z]\w*", word)}


def test_private_names_of_libraries_are_listed_and_there() -> None:
    listed = re.findall(r"^\| `(_\w+)` \| (\w+) \| `(.*)` \|$", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    assert {word for word, _, _ in listed} == private_words()
    for word, library, file in listed:
        found = importlib.util.find_spec(library)
        path = Path(next(iter(getattr(found, "submodule_search_locations", ())), library)) / file
        assert re.search(rf"\b{word}\b", f"{path.read_text(encoding='utf-8')} {file}"), (word, file)

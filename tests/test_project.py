"""What a stranger meets: licence, metadata, workflows, images; each names what exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from kit import __version__
from kit.extras import DISTRIBUTION, EXTRAS
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_one_version_and_one_licence() -> None:
    assert PROJECT["version"] == read("CITATION.cff")["version"] == __version__
    assert PROJECT["license"] == read("CITATION.cff")["license"] == "Apache-2.0"


def test_what_pip_is_told_to_install_is_this_project() -> None:
    """PyPI's ``kit`` is another one. An extra that is named exists."""
    assert PROJECT["name"] == DISTRIBUTION
    extras = PROJECT["optional-dependencies"].keys()
    assert extras >= {*EXTRAS.values()}
    folders = [ROOT / name for name in ("benchmarks", "docker", "docs", "examples", "kit", "scripts", "tests")]
    for path in [each for place in folders for each in place.rglob("*")] + [
        *ROOT.glob("*.md"),
        ROOT / "pyproject.toml",
    ]:
        if path.suffix in (".py", ".md", ".toml", ".sh", ".yaml") and path.name != "CHANGELOG.md":
            text = path.read_text(encoding="utf-8")
            named = re.findall(r"\b([\w-]*kit)\[([\w,-]+)\]|\binstall\(['\"]([\w-]+)['\"]\)", text)
            assert {project for project, _, _ in named} <= {DISTRIBUTION, ""}, path
            assert {extra for _, several, one in named for extra in (*several.split(","), one)} <= extras | {""}, path
            assert not re.search(r"pip install ['\"]?kit\b", text.replace(r"pip install ['\"]?kit", "")), path


def test_beside_a_clone_the_package_is_the_package(tmp_path: Path) -> None:
    """``git clone`` makes a folder named kit: without __init__.py, and still a package to Python."""
    (tmp_path / "kit").mkdir()
    command = [sys.executable, "-c", "import kit; print(kit.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == __version__, done.stderr


def test_ci_tests_every_python_that_is_promised_by_make_targets_that_exist() -> None:
    jobs = read(".github/workflows/ci.yaml")["jobs"]
    promised = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert all({*jobs[name]["strategy"]["matrix"]["python"]} == promised for name in ("fast", "planner"))
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {name for step in steps for name in re.findall(r"^make ([a-z-]+)", step)} <= {*TARGETS}

"""The diff of each how-to page applies to this tree, touches few files, and does what the page promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

PAGES = sorted((ROOT / "docs" / "how-to").glob("add-a-*.md"))
MOST_FILES = 3
"""Tests aside."""


def done(*words: str, given: str, tree: Path) -> None:
    """A program with ``given`` as its input, in the tree as the package."""
    path = {"PYTHONPATH": str(tree), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = os.environ | path | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    ended = subprocess.run(words, input=given, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_promises(page: Path, tmp_path: Path) -> None:
    """In a copy of the sources, pictures aside, in a folder named as ``git clone`` names it: as the package."""
    text, tree = page.read_text(encoding="utf-8"), tmp_path / "kit"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "images", "build", "runs")
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
    diff, commands = ("".join(re.findall(rf"^```{kind}\n(.*?)^```$", text, re.S | re.M)) for kind in ("diff", "bash"))
    done("git", "apply", "-", given=diff, tree=tree)
    done("bash", "-euo", "pipefail", given=commands, tree=tree)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_diff_applies_and_touches_few_files(page: Path) -> None:
    diff = "".join(re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    touched = [name for name in re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE) if "test" not in name]
    assert 1 <= len(touched) <= MOST_FILES, touched
    done("git", "apply", "--check", "-", given=diff, tree=ROOT)

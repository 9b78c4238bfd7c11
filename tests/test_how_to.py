"""The diff of each how-to page applies to this tree, touches few files, and does what the page promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "how-to").glob("add-a-*.md"))
MOST_FILES = 3
"""Tests aside."""


def blocks(page: Path, kind: str) -> str:
    return "".join(re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tracked files of this tree, pictures aside, in a folder named as ``git clone`` names it: as the package."""
    tree = tmp_path / "kit"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("docs/images"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_diff_applies_and_touches_few_files(page: Path) -> None:
    diff = blocks(page, "diff")
    touched = [name for name in re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE) if not name.startswith("tests/")]
    assert 1 <= len(touched) <= MOST_FILES, touched
    applied = subprocess.run(
        ["git", "apply", "--check", "-"], input=diff, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr


@pytest.mark.everyday("add-a-family")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_promises(page: Path, copy: Path) -> None:
    diff, commands = blocks(page, "diff"), blocks(page, "bash")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    applied = subprocess.run(
        ["git", "apply", "-"], input=diff, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
    environment |= {"PYTHONPATH": str(copy), "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail"],
        input=commands,
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_there_is_a_page_for_each_thing() -> None:
    assert [page.stem.removeprefix("add-a-") for page in PAGES] == ["family", "gpu", "launcher", "layout-flag", "rule"]

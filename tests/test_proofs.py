"""Every command that a page, a test or the Makefile names can be imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.proofs import PROOFS, lacking, main

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
KINDS = ("*.md", "*.py", "*.sh", "*.yaml", "Makefile", ".ci/run")
FOLDERS = ("benchmarks", "docs", "examples", "kit/cost", "kit/emit", "kit/specs", "recipes", "scripts", "tests/system")
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*(each for folder in FOLDERS for kind in KINDS for each in (ROOT / folder).rglob(kind)),
                 *(each for kind in KINDS for each in ROOT.glob(kind))]
}  # fmt: skip
NAMED = [re.findall(r"-m ((?:benchmarks|tests)\.[a-z0-9_.]*[a-z0-9_])", text) for text in TEXTS.values()]
PROVEN = [re.findall(r"-m (\S+)", line) for proof in PROOFS.values() for line in proof.commands]
COMMANDS = {name for names in (*NAMED, *PROVEN) for name in names}
IMPORTS = """
import importlib.util, json, sys, traceback
failed = {}
for name in sys.argv[1:]:
    try:
        package = importlib.util.find_spec(name).submodule_search_locations
        importlib.import_module(f"{name}.__main__" if package else name)
    except BaseException:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""


@pytest.mark.nightly
def test_every_command_can_be_imported() -> None:
    """In a process of its own: some import engines. ``--help`` of a module that fails to import says nothing."""
    names = sorted(COMMANDS - {"pip", "venv"})
    assert len(names) > 35
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *names], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_every_make_target_and_every_proof_named_is_there() -> None:
    for file, text in TEXTS.items():
        named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)(?: +#.*)?$", text, re.M))
        assert named <= TARGETS, f"{file}: make {named - TARGETS}"
        proofs = set(re.findall(r"prove NAME=([a-z-]+)", text))
        assert proofs <= {*PROOFS, "daily"}, f"{file}: make prove NAME={proofs - PROOFS.keys()}"


def test_what_a_proof_lacks_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else name)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("PYTHON", "no-such-python")
    said = {name: lacking(PROOFS[name]) for name in ("demo", "trackers", "versions-newest", "hosts")}
    assert (said["demo"], said["trackers"]) == ("", "not installed: pip install trackio")
    assert said["versions-newest"].startswith("no Python 3.12 is here: ")
    assert "run it as root" in said["hosts"]


def test_the_list_names_every_proof_and_an_unknown_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main([]), [line.split()[0] for line in capsys.readouterr().out.splitlines()]) == (0, list(PROOFS))
    assert (main(["nothing"]), "there are demo, " in capsys.readouterr().err) == (2, True)

"""Every command that a page, a test or the Makefile names is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import PROOFS, main

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def _texts() -> dict[str, str]:
    kinds = ("*.md", "*.py", "*.sh", "*.yaml", "Makefile", ".ci/run")
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split() if not name.startswith(("kit/diagnose", "tests/diagnose"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files if path.is_file()}


TEXTS = _texts()
NOT_OURS = {"pip", "venv"}
COMMANDS = sorted(
    {name.rstrip(".") for text in TEXTS.values() for name in re.findall(r"python -m (benchmarks[a-z0-9_.]*)", text)}
    | {word for proof in PROOFS.values() for line in proof.commands for word in re.findall(r"-m (\S+)", line)}
    - {"pip", "venv"}
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_can_be_started(name: str) -> None:
    """Read, not imported: some import engines, and workers act at import."""
    path = ROOT.joinpath(*name.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert file.is_file(), f"python -m {name}"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body), file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"):
            assert importlib.util.find_spec(str(node.module)) is not None, f"{file} imports {node.module}"


def test_every_make_target_and_every_proof_named_is_there() -> None:
    for file, text in TEXTS.items():
        named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)(?: +#.*)?$", text, re.M))
        assert named <= TARGETS, f"{file}: make {named - TARGETS}"
        proofs = set(re.findall(r"prove NAME=([a-z-]+(?:[0-9]\.[0-9]+)?)", text))
        assert proofs <= PROOFS.keys(), f"{file}: make prove NAME={proofs - PROOFS.keys()}"


def test_at_most_ten_targets_beside_help_and_prove() -> None:
    assert len(TARGETS - {"help", "prove"}) <= 10


def test_the_list_names_every_proof_and_an_unknown_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PROOFS)
    assert main(["nothing"]) == 2
    assert "there are demo, " in capsys.readouterr().err

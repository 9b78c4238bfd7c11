"""``pip install .`` without extras: what plans works, and every other command names the extra that it lacks."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kit.extras import DISTRIBUTION, EXTRAS, install
from tests.support import ROOT

RECIPE = ROOT / "recipes" / "tiny-llama-pretrain-zero3-2xcpu.yaml"


def distributions(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """What pip installs with a distribution and its extras, as far as it is here."""
    found: set[str] = set()
    wanted = [Requirement(f"{name}[{','.join(extras)}]")]
    for one in wanted:  # grows
        if str(one) in found:
            continue
        found |= {str(one), one.name}
        for text in distribution(one.name).requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in (one.extras or {""})):
                wanted.append(Requirement(f"{inner.name}[{','.join(inner.extras)}]"))
    return {each.partition("[")[0].lower().replace("_", "-") for each in found}


installed = functools.cache(packages_distributions)


def providers(module: str) -> set[str]:
    return {each.lower().replace("_", "-") for each in installed().get(module, [])}


def test_every_module_is_of_the_base_or_of_the_extra_that_is_named() -> None:
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "kit").rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in names}
    base = distributions(DISTRIBUTION)
    foreign = {name for name in imported - sys.stdlib_module_names - {"kit", ""} if not providers(name) & base}
    assert foreign <= EXTRAS.keys()
    assert [
        module for module in foreign if not providers(module) & distributions(DISTRIBUTION, frozenset({EXTRAS[module]}))
    ] == []


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command in a virtual environment that has kit's base dependencies alone, linked to those of this one."""
    place = tmp_path_factory.mktemp("planner") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_paths()["purelib"])
    for name in distributions(DISTRIBUTION) - {DISTRIBUTION}:
        for top in {file.parts[0] for file in distribution(name).files or () if file.parts[0] != ".."}:
            (packages / top).symlink_to(here / top)
    (information,) = here.glob(f"{DISTRIBUTION.replace('-', '_')}-*.dist-info")  # which names the add-ons
    (packages / information.name).symlink_to(information)
    (packages / "kit.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    return str(place / "bin" / "python")


def run(kit: str, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kit, "-m", "kit", *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)


def test_what_plans_works(kit: str, tmp_path: Path) -> None:
    for words in (
        ["plan", "llama-3.1-8b", "--gpus", "8xH100"],
        ["explain", "llama-3.1-8b", "--gpus", "8xH100"],
        ["recipes", "copy", RECIPE.stem, "copied"],
        ["lint", "copied/run"],
    ):
        done = run(kit, *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), words


@pytest.mark.everyday("convert-numpy-torch")
@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["convert", "data", "a.txt", "--tokenizer", ".", "--out", "out"], "numpy", "torch"),
        (["convert", "model", ".", "--out", "out"], "xxhash", "torch"),
        (["convert", "inspect", "."], "transformers", "torch"),
        (["generate", ".", "--prompt", "a"], "torch", "torch"),
        (["rehearse", RECIPE.stem], "psutil", "torch"),
        (["ui", "--port", "8973"], "nicegui", "ui"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_names_the_extra_that_it_lacks(
    kit: str, tmp_path: Path, words: list[str], module: str, extra: str
) -> None:
    (tmp_path / "a.txt").write_text("a\n", encoding="utf-8")
    done = run(kit, *words, cwd=tmp_path)
    fix = f"pip install 'deepspeed-megatron-kit[{extra}]'"
    assert (done.stderr, done.returncode) == (f"error: this needs {module}, which is not installed: {fix}\n", 2)
    assert not list(tmp_path.glob("out*"))


def test_a_run_and_the_doctor_name_the_engines_extra(kit: str, tmp_path: Path) -> None:
    assert run(kit, "emit", RECIPE, "--out", "run", cwd=tmp_path).returncode == 0
    done = run(kit, "train", "run", cwd=tmp_path)
    assert install("deepspeed") in done.stderr
    assert "Traceback" not in done.stderr
    done = run(kit, "doctor", "--plan", "run", cwd=tmp_path)
    assert f"{install('torch', 'deepspeed')} there" in done.stdout
    assert install("torch") in run(kit, "doctor", "--bandwidth", cwd=tmp_path).stdout

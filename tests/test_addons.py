"""kit without its add-ons, and with a stranger's: nothing but entry points joins them to the core."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kit.cli.app import ADDONS, COMMANDS
from kit.emit.run_directory import TARGETS, RunDirectory, write
from kit.errors import RunDirectoryError
from kit.specs.run import DataSpec, RunSpec
from tests.emit.plans import ZERO2, plan_of
from tests.planning.test_imports import KIT, imported
from tests.support.assets import RECIPE, prepare
from tests.support.files import file_with, files_in
from tests.support.refusals import refusal

DECLARED = {entry.name for group in (ADDONS, TARGETS) for entry in entry_points(group=group)}


def test_nothing_of_the_core_imports_one() -> None:
    core = [file for file in KIT.rglob("*.py") if file.relative_to(KIT).parts[0] != "addons"]
    assert [file for file in core if any(name.startswith("kit.addons") for name in imported(file))] == []
    assert COMMANDS.keys() & DECLARED == set(), "an add-on would never be asked for a command of the core"


def alone(path: Path) -> dict[str, str]:
    """An environment in which ``path`` is before all other packages."""
    return os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}


def run(path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kit", *map(str, words)]
    return subprocess.run(command, cwd=path, env=alone(path), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with kit, and no add-on in it."""
    place = tmp_path_factory.mktemp("core")
    shutil.copytree(KIT, place / "kit", ignore=shutil.ignore_patterns("addons", "__pycache__"))
    shutil.copytree(RECIPE.parent, place / "recipes")
    return place


ONE_AFTER_THE_OTHER = """
import sys
import kit.cli
import kit.training.__main__ as worker

for words in eval(sys.argv[1]):
    if words[0] == "worker":
        assert worker.main(words[1:]) == 0
        continue
    sys.argv[1:] = words
    try:
        kit.cli.main()
    except SystemExit as ended:
        print("exit", ended.code, file=sys.stderr)
"""
"""Commands in one process, and a rank of a run, which ``kit train`` would start in another."""


def test_without_them_kit_plans_emits_trains_and_converts(core: Path) -> None:
    assets = prepare()
    changes = [f"run.model_path={assets.model}", f"run.data={{train: {assets.train}}}", "run.steps=2"]
    file_with(core / "theirs" / "mp_rank_00_model_states.pt", "")
    commands = [
        ["plan", str(RECIPE)],
        ["emit", str(RECIPE), *changes, "--out", "run"],
        ["worker", "run"],
        ["convert", "model", "run/checkpoints/step-00000002", "--out", "model"],
        ["convert", "model", "theirs", "--out", "moved"],
    ]
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, repr(commands)]
    done = subprocess.run(command, cwd=core, env=alone(core), capture_output=True, text=True, check=True)
    assert re.findall(r"^exit (.*)", done.stderr, re.MULTILINE) == ["0", "0", "0", "2"], done.stderr
    assert (core / "model" / "config.json").is_file()
    (refused,) = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert "cannot be imported were not tried: " in refused
    assert "deepspeed (kit.addons.importers.formats:DEEPSPEED)" in refused


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["lint", "a.json"], "lint"),
        (["convert", "inspect", "a"], "inspect"),
        (["emit", RECIPE, "--target", "k8s", "--out", "b"], "k8s"),
    ],
)
def test_what_is_named_and_not_there_is_said_in_a_line(core: Path, words: list[object], what: str) -> None:
    done = run(core, *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {what} of deepspeed-megatron-kit: kit.addons.")


STRANGER = {
    "stranger-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n",
    "stranger-1.0.dist-info/entry_points.txt": """[kit.commands]
greet = stranger:greet
plan = stranger:greet
[kit.conversions]
greet = stranger:greet
model = stranger:greet
[kit.targets]
nomad = stranger:FILES
[kit.run_files]
theirs = stranger:EVERY
gone = stranger:GONE
""",
    "stranger.py": """from kit.emit.derived_file import DerivedFile

def greet(name: str = "you") -> None:
    \"\"\"Greet.\"\"\"
    print("hello", name)

FILES = (
    DerivedFile(
        "nomad.json",
        lambda plan: '{"nodes": 1, "priority": 5}',
        target="nomad",
        plan_owned_keys={"nodes": "cluster"},
    ),
    DerivedFile("other.json", lambda plan: "{}", target="other"),
)
EVERY = (
    DerivedFile(
        "theirs.json",
        lambda plan: '{"nodes": 1, "priority": STEPS}',
        plan_owned_keys={"nodes": "cluster"},
        of_run=lambda text, run: text.replace("STEPS", str(run.steps)),
        told=lambda plan: ["`theirs.json` has the steps."],
    ),
    DerivedFile("cpu.txt", lambda plan: "", lambda plan: plan.cluster.gpu.device == "cuda"),
)
""",
}


def test_a_strangers_command_and_target_are_kits(tmp_path: Path) -> None:
    """And a command of kit's own stays kit's."""
    place = files_in(tmp_path, STRANGER)
    for words in ([], ["convert"]):
        assert run(place, *words, "greet", "--name", "kit").stdout == "hello kit\n"
        assert "  greet " in run(place, *words, "--help").stdout
    assert "hello" not in run(place, "plan", "llama-3.2-1b", "--gpus", "8xH100").stdout
    assert "--merge-into" in run(place, "convert", "model", "--help").stdout
    assert (
        run(place, "emit", RECIPE, "--target", "nomad", "--out", "run").stderr.count(
            "warning: gone of stranger: stranger:GONE"
        )
        == 1
    )
    assert (place / "run" / "nomad.json").read_text() == '{"nodes": 1, "priority": 5}'
    assert {"other.json", "cpu.txt"} & {path.name for path in (place / "run").iterdir()} == set()
    assert (place / "run" / "theirs.json").read_text() == '{"nodes": 1, "priority": 60}'
    assert "`theirs.json` has the steps." in (place / "run" / "README.md").read_text()


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(("name", "priority"), [("nomad.json", 5), ("theirs.json", 60)])
def test_an_edit_of_a_strangers_file_is_seen_also_where_it_is_gone(
    name: str, priority: int, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed, by key: then what the plan owns is refused."""
    monkeypatch.syspath_prepend(files_in(tmp_path / "packages", STRANGER))
    run_spec = RunSpec(steps=60, data=DataSpec(train=str(tmp_path / "data")))
    file = write(plan_of(**ZERO2), run_spec, tmp_path / "run", ["nomad"]).path / name
    assert RunDirectory.open(file.parent).edits == ()
    if not installed:
        monkeypatch.undo()
    (edit,) = RunDirectory.open(file_with(file, '{"nodes": 1, "priority": 9}').parent).edits
    seen = ("priority", priority, 9) if installed else ("(text)", "as emitted", "edited")
    assert (edit.key, edit.planned, edit.found) == seen
    file.write_text(f'{{"nodes": 2, "priority": {priority}}}')
    if installed:
        assert "change cluster in the recipe" in refusal(RunDirectoryError, RunDirectory.open, file.parent)
    else:
        assert len(RunDirectory.open(file.parent).edits) == 1

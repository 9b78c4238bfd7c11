"""What a patch of another trainer's file does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.addons.configs.answer import Answer, answer, reads_back
from kit.addons.configs.patch import edited, unified_diff
from kit.addons.configs.reading import source_of
from kit.addons.configs.variants import variants
from kit.cost.memory.peak import peak_gib
from tests.addons.config_files import REGISTRY, TIGHT

EDITS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "scalar": ("a.yaml", "a: 1  # one\nbase_model: x\n", {"a": 22}, "a: 22  # one\nbase_model: x\n"),
    "switch": ("a.yaml", "base_model: x\na: True # so\n", {"a": False}, "base_model: x\na: false # so\n"),
    "empty": ("a.yaml", "base_model: x\na:\nb: 2\n", {"a": 3}, "base_model: x\na: 3\nb: 2\n"),
    "new": ("a.yaml", "base_model: x  # m\n# end\n", {"b": "y/z.json"}, "base_model: x  # m\nb: y/z.json\n# end\n"),
    "two": ("a.yaml", "base_model: x\n", {"b": 1, "c": 2}, "base_model: x\nb: 1\nc: 2\n"),
    "new section of two": ("a.yaml", "base_model: x\n", {"a.b": 1, "a.c": 2}, "base_model: x\na:\n  b: 1\n  c: 2\n"),
    "no newline": ("a.yaml", "base_model: x", {"b": 1}, "base_model: x\nb: 1"),
    "list last": (
        "a.yaml",
        "base_model: x\nl:\n  - 1\n  - 2\n\n# c\n",
        {"b": 1},
        "base_model: x\nl:\n  - 1\n  - 2\nb: 1\n\n# c\n",
    ),
    "section": (
        "a.yaml",
        "base_model: x\ns:\n    p: 1 # p\nq: 2\n",
        {"s.r": 3},
        "base_model: x\ns:\n    p: 1 # p\n    r: 3\nq: 2\n",
    ),
    "new section": ("a.yaml", "base_model: x\n", {"s.r": 3}, "base_model: x\ns:\n  r: 3\n"),
    "empty section": ("a.yaml", "base_model: x\ns:\nq: 2\n", {"s.r": 3}, "base_model: x\ns:\n  r: 3\nq: 2\n"),
    "flow": ("a.yaml", "base_model: x\ns: {p: 1}\n", {"s.r": True}, "base_model: x\ns: {p: 1, r: true}\n"),
    "json": (
        "a.json",
        '{\n  "base_model": "x",\n  "a": 1\n}\n',
        {"a": "z", "b": True},
        '{\n  "base_model": "x",\n  "a": "z",\n  "b": true\n}\n',
    ),
    "flag": ("s.sh", "swift sft --a 1 \\\n  --b 2 # c\n", {"a": 5}, "swift sft --a 5 \\\n  --b 2 # c\n"),
    "equals": ("s.sh", "swift sft --a='1' --b 2\n", {"a": 5}, "swift sft --a=5 --b 2\n"),
    "new flag": (
        "s.sh",
        "swift sft \\\n  --a 1\necho\n",
        {"b_c": "x y"},
        "swift sft \\\n  --a 1 \\\n  --b_c 'x y'\necho\n",
    ),
    "variable": ("s.sh", 'A=1\nswift sft --a "$A" --b $A\n', {"a": 5}, "A=1\nswift sft --a 5 --b $A\n"),
    "switch on": (
        "s.sh",
        "python -m openrlhf.cli.train_sft --ds.zero_stage 2\n",
        {"ds.adam_offload": True, "ds.zero_stage": 3},
        "python -m openrlhf.cli.train_sft --ds.zero_stage 3 \\\n    --ds.adam_offload\n",
    ),
    "class": (
        "s.sh",
        "run_train.sh --module a --config b \\\n  --training.steps 5 activation-checkpoint:selective\n",
        {"activation_checkpoint": "full", "training.enable_cpu_offload": True},
        "run_train.sh --module a --config b \\\n  --training.steps 5 \\\n"
        "  --training.enable_cpu_offload activation-checkpoint:full\n",
    ),
    "new class": (
        "s.sh",
        "run_train.sh --module a --config b\n",
        {"activation_checkpoint": "none", "training.enable_cpu_offload": True},
        "run_train.sh --module a --config b \\\n    --training.enable_cpu_offload \\\n    activation-checkpoint:none\n",
    ),
    "in a variable": ("s.sh", 'O="--a 1"\nswift sft $O\n', {"a": 5}, 'O="--a 1"\nswift sft $O \\\n    --a 5\n'),
    "toml": (
        "a.toml",
        '[training]\nsteps=1 # s\n[parallelism]\na = "x" # b\n',
        {"training.steps": 22, "parallelism.a": "yz"},
        '[training]\nsteps=22 # s\n[parallelism]\na = "yz" # b\n',
    ),
    "toml, new": (
        "a.toml",
        "[training]\nsteps = 1 # s\n\n# p\n[parallelism]\na = [\n  1,\n]\n",
        {"training.b": True, "training.c": 2, "parallelism.b": 3},
        "[training]\nsteps = 1 # s\nb = true\nc = 2\n\n# p\n[parallelism]\nb = 3\na = [\n  1,\n]\n",
    ),
    "toml, new section": (
        "a.toml",
        "[parallelism]\na.b = 1\n[training] # t\n[[training.list]]\nsteps = 7",
        {"training.steps": 2, "debug.x": 3, "debug.y": 4},
        "[parallelism]\na.b = 1\n[training] # t\nsteps = 2\n[[training.list]]\nsteps = 7\n\n[debug]\nx = 3\ny = 4\n",
    ),
    "toml, a text with signs to escape": (
        "a.toml",
        "[training]\npath = 'x' # s\n[parallelism]\na = 1\n",
        {"training.path": 'C:\\new\t"é"\x7f', "parallelism.b": "one\ntwo 😀"},
        '[training]\npath = "C:\\\\new\\t\\"é\\"\\u007f" # s\n[parallelism]\na = 1\nb = "one\\ntwo 😀"\n',
    ),
    "array": (
        "s.sh",
        'A=(--a 1 # x\n --b 2)\nswift sft "${A[@]}"\n',
        {"a": 5},
        'A=(--a 5 # x\n --b 2)\nswift sft "${A[@]}"\n',
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_changes_the_value_alone(case: str, tmp_path: Path) -> None:
    name, before, values, after = EDITS[case]
    source, _ = source_of(before, name)
    assert edited(source, values) == after
    again, _ = source_of(after, name)
    assert {key: str(again.entries[key].value).lower() for key in values} == {
        key: str(value).lower() for key, value in values.items()
    }
    (tmp_path / name).write_text(before, encoding="utf-8")
    diff = unified_diff(source, name, values)
    subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / name).read_text(encoding="utf-8") == after


@pytest.fixture(params=TIGHT)
def tight(request: pytest.FixtureRequest, file: Callable[[str, str], Path]) -> Answer:
    text, gpus = TIGHT[request.param]
    return answer(file(request.param, text), gpus)


def test_the_nearest_change_fits_and_its_patch_reads_back(tight: Answer, tmp_path: Path) -> None:
    assert not tight.now.fits
    assert tight.nearest is not None
    subprocess.run(["patch", "-p1", "-s"], input=tight.patch, text=True, cwd=tmp_path, check=True)
    again = answer(tight.path, tight.asked.gpus)
    assert again.now.fits
    assert again.now.described.workload == tight.nearest.described.workload
    assert again.now.peak_gib == pytest.approx(peak_gib(tight.nearest.described.workload))
    fewer = [each for each in variants(tight.asked, tight.now) if len(each.values) < len(tight.nearest.values)]
    assert not any(each.fits and each.peak_gib * 1.08 < 78 and each.host_fits for each in fewer if len(fewer) < 400)


def test_a_change_keeps_what_the_file_asks_for(tight: Answer) -> None:
    """Of what does not fit two changes are told, also where they are no faster than what does not fit."""
    assert tight.nearest is not None
    assert tight.fastest is not None
    for found in (tight.nearest, tight.fastest):
        work = found.described.workload
        assert work.job == tight.plan.job
        assert work.layout.global_batch_size == tight.plan.layout.global_batch_size
        assert work.layout.world_size == tight.plan.layout.world_size
        assert reads_back(tight.asked, found)
        assert found.step_s <= tight.nearest.step_s * 1.03


def test_a_patch_that_would_not_read_back_is_not_printed(tight: Answer) -> None:
    """Such as one of a value that another key overrules."""
    assert tight.nearest is not None
    values = dict(tight.nearest.values)
    values.popitem()
    assert not reads_back(tight.asked, type(tight.nearest)(**{**vars(tight.nearest), "values": values}))


def test_a_class_follows_every_flag() -> None:
    """tyro gives the flags behind ``part:class`` to that part."""
    source, _ = source_of(REGISTRY, "llama3/config_registry.py::llama_8b")
    found = edited(source, {"activation_checkpoint": "full", "training.enable_cpu_offload": True})
    assert found == "--training.enable-cpu-offload activation-checkpoint:full"

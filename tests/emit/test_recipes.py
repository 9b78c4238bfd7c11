"""The recipes that come with kit: each plans, is copied, and has its files in a checkout. tests/test_generated.py
compares these with the recipes; test_launch.py hands them to kit lint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from kit.emit import shipped_files
from kit.emit.copy_recipe import copy_recipe
from kit.emit.run_directory import RunDirectory
from kit.emit.shipped_files import TEMPLATES
from kit.errors import KitError, SpecError
from kit.planner.make_plan import make_plan
from kit.specs.extra import flat
from kit.specs.recipe import load_recipe
from kit.specs.shipped import headline, recipe_names, recipe_path
from tests.support.in_process import kit_main
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_what_it_is_for_and_plans(name: str) -> None:
    path = recipe_path(name)
    assert headline(path).endswith((".", ":", ")"))
    assert len(path.read_text().splitlines()) <= 60
    recipe = load_recipe(path)
    plan = make_plan(recipe.model, recipe.cluster, recipe.job, recipe.layout)
    assert plan.layout.world_size == recipe.cluster.num_gpus
    assert plan.layout.global_batch_size == recipe.job.global_batch_size


@pytest.fixture(scope="module")
def shipped() -> dict[str, str]:
    """All of them are planned once."""
    return shipped_files.shipped_files()


@pytest.mark.slow
def test_drift_is_noticed_and_mended(shipped: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_files, "shipped_files", lambda: shipped)
    for folder in ("ds_configs", "launch"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    edited, script = tmp_path / "ds_configs/zero2.json", next((tmp_path / "launch").rglob("launch.sh"))
    edited.write_text(edited.read_text().replace('"stage": 2', '"stage": 1'))
    (tmp_path / "ds_configs/zero1.json").unlink()
    (tmp_path / "launch/forgotten.sh").write_text("#!/bin/sh\n")
    shutil.rmtree(script.parent)
    missing = {file.relative_to(ROOT).as_posix() for file in (ROOT / "launch" / script.parent.name).iterdir()}
    assert set(shipped_files.check(tmp_path)) == {f"{name} is missing" for name in missing} | {
        "ds_configs/zero1.json is missing",
        "ds_configs/zero2.json is not what its recipe says today",
        "launch/forgotten.sh follows from no recipe",
    }
    assert (len(shipped_files.write_shipped(tmp_path)), shipped_files.check(tmp_path)) == (3 + len(missing), [])
    assert (script.stat().st_mode & 0o777, edited.stat().st_mode & 0o777) == (0o755, 0o644)


@pytest.mark.slow
def test_what_is_committed_of_a_recipe(shipped: dict[str, str]) -> None:
    """Of those that fit and are for GPUs: what starts them; DeepSpeed's configuration with the disk of the recipe, or a
    placeholder, beside its reasons."""
    assert not [name for name in shipped if "cpu" in name]
    folder = "launch/llama-3-70b-sft-zero-infinity-8xh100/"
    assert {name.removeprefix(folder) for name in shipped if name.startswith(folder)} == {
        "accelerate.yaml", "launch.sh", "README.md", "slurm.sbatch",
    }  # fmt: skip
    for name in ("llama-3-70b-sft-zero-infinity-8xh100", "zero-infinity-nvme"):
        zero = json.loads(shipped[f"ds_configs/{name}.json"])["zero_optimization"]
        assert zero["offload_optimizer"]["nvme_path"] == "/mnt/nvme"
    page = shipped["ds_configs/README.md"]
    assert "| [llama-3.1-8b-sft-zero2-8xh100](llama-3.1-8b-sft-zero2-8xh100.json) | deepspeed" in page
    assert "# ds_config.json, key by key" in shipped["ds_configs/llama-3.1-8b-sft-zero2-8xh100.md"]
    assert not [name for name in shipped if name.startswith("ds_configs/llama-3-70b-pretrain-64xh100")]


SHARDING = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2-offload": {"stage": 2, "offload_optimizer.device": "cpu"},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    "zero3-offload": {"stage": 3, "offload_optimizer.device": "cpu", "offload_param.device": "cpu"},
    "zero-infinity-nvme": {"stage": 3, "offload_optimizer.device": "nvme", "offload_param.nvme_path": "/mnt/nvme"},
    "zero++": {
        "stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True,
    },
    "ulysses": {"stage": 3},
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_templates_are_what_they_are_called(template: shipped_files.Template) -> None:
    config = json.loads(template.text())
    found = flat(config["zero_optimization"])
    expected = SHARDING[template.name]
    assert {key: found.get(key) for key in expected} == expected
    of_ulysses = (128, 8) if template.name == "ulysses" else ("auto", None)  # the others are for the Trainer
    assert (config["train_batch_size"], config.get("sequence_parallel_size")) == of_ulysses


SFT, DPO = "llama-3.1-8b-sft-zero2-8xh100", "llama-3.1-8b-trl-dpo-zero3-8xh100"


def test_a_copy_runs_from_its_own_directory(tmp_path: Path) -> None:
    made = copy_recipe(SFT, tmp_path / "new" / "mine")
    text, page = (made / "recipe.yaml").read_text(), (made / "README.md").read_text()
    assert "extends" not in text
    assert text.startswith(f"# {headline(recipe_path(SFT))}\n# A copy of kit's {SFT}: change it, then kit emit")
    for part in (
        "- `data/train`\n- `data/validation`\n- `models/llama-3.1-8b`\n",
        "kit convert data rows/*.jsonl --tokenizer models/llama-3.1-8b --objective sft --out data/train",
        "\nkit train run   ",
    ):  # fmt: skip
        assert part in page
    assert ("trl" in page, (made / "run/launch.sh").is_file()) == (False, True)
    original, copied = load_recipe(recipe_path(SFT)), load_recipe(made / "recipe.yaml")
    for part in ("model", "cluster", "job", "layout"):
        assert getattr(copied, part) == getattr(original, part)
    assert RunDirectory.open(made / "run").run.data.train == str(made / "data/train")
    for name, place, error, said in (
        (SFT, made, KitError, "exists already and is not overwritten; choose another directory"),
        (SFT.removesuffix("-8xh100"), tmp_path / "other", SpecError, "did you mean"),
        (SFT, made / "README.md" / "x", KitError, "cannot be written: Not a directory"),
    ):
        assert re.search(said, refusal(error, copy_recipe, name, place))
    assert {path.name for path in tmp_path.iterdir()} == {"new"}
    page = (copy_recipe("llama-3-70b-pretrain-64xh100", tmp_path / "pretrain") / "README.md").read_text()
    assert ("text/*.jsonl --tokenizer" in page, "--objective" in page) == (True, False)
    assert ("cd run && sbatch slurm.sbatch" in page, "\nkit train run  " in page) == (True, False)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.emit.copy_recipe.plan_of_recipe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        copy_recipe(SFT, tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_for_trl_has_its_script_and_its_command(tmp_path: Path) -> None:
    page = (copy_recipe(DPO, tmp_path / "dpo") / "README.md").read_text()
    assert (
        "cd run && accelerate launch --config_file accelerate.yaml own_script.py trl_dpo.py --model "
        "../models/llama-3.1-8b --preferences ../data/preferences.jsonl --output_dir out --bf16 true "
    ) in page
    assert "--per_device_train_batch_size 1 " in page  # a pair is two sequences
    assert "kit train" not in page
    assert (tmp_path / "dpo/run/trl_dpo.py").read_text() == (ROOT / "examples/trl_dpo.py").read_text()
    page = (copy_recipe("llama-3.1-8b-trl-sft-zero3-8xh100", tmp_path / "sft") / "README.md").read_text()
    assert "trl_sft.py --model ../models/llama-3.1-8b --chats ../data/chats.jsonl --output_dir out" in page
    assert (
        page.index("With TRL's trainer:")
        < page.index("With kit's own loop:")
        < page.index("--objective sft --out data")
    )


def test_the_command_line_lists_and_copies(tmp_path: Path) -> None:
    listed = kit_main("recipes").out
    assert all(f"{name}\n    " in listed for name in recipe_names())
    copies = [kit_main("recipes", "copy", "llama-1b-pretrain-amp-1xh100", str(tmp_path / "mine")) for _ in range(2)]
    assert [done.code for done in copies] == [0, 2]
    assert "not overwritten" in copies[1].err

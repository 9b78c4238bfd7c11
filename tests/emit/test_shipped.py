"""The recipes that come with kit: each plans, its committed files are today's, and their readers take them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kit.diagnose.lint import lint
from kit.emit import generated
from kit.emit.copy_recipe import copy_recipe
from kit.emit.generated import TEMPLATES
from kit.emit.run_directory import RunDirectory
from kit.errors import KitError, SpecError
from kit.planner.make_plan import make_plan
from kit.specs.recipe import load_recipe
from kit.specs.shipped import headline, recipe_names, recipe_path
from tests.test_cli import kit

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_what_it_is_for_and_plans(name: str) -> None:
    path = recipe_path(name)
    lines = path.read_text().splitlines()
    assert headline(path).endswith((".", ":", ")"))
    assert len(lines) <= 60
    recipe = load_recipe(path)
    plan = make_plan(recipe.model, recipe.cluster, recipe.job, recipe.layout)
    assert plan.layout.world_size == recipe.cluster.num_gpus
    assert plan.layout.global_batch_size == recipe.job.global_batch_size


def test_committed_files_are_todays() -> None:
    assert generated.check(ROOT) == []


def test_drift_is_noticed_and_mended(tmp_path: Path) -> None:
    for folder in ("ds_configs", "launch"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    edited = tmp_path / "ds_configs/zero2.json"
    edited.write_text(edited.read_text().replace('"stage": 2', '"stage": 1'))
    (tmp_path / "ds_configs/zero1.json").unlink()
    (tmp_path / "launch/forgotten.sh").write_text("#!/bin/sh\n")
    assert generated.check(tmp_path) == [
        "ds_configs/zero1.json is missing",
        "ds_configs/zero2.json is not what its recipe says today",
        "launch/forgotten.sh follows from no recipe",
    ]
    assert len(generated.write_shipped(tmp_path)) == 3
    assert generated.check(tmp_path) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_committed_configurations_lint_clean(path: Path) -> None:
    assert [str(finding) for finding in lint(path) if finding.severity != "note"] == []


def test_templates_are_all_there_and_differ() -> None:
    texts = {
        template.name: json.loads((ROOT / f"ds_configs/{template.name}.json").read_text()) for template in TEMPLATES
    }
    numbers = {name for name, text in texts.items() if text["train_batch_size"] != "auto"}
    assert numbers == {"ulysses"}, "the others are for the Trainer"
    assert texts["zero1"]["zero_optimization"]["stage"] == 1
    assert texts["zero2-offload"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert texts["zero-infinity-nvme"]["zero_optimization"]["offload_param"]["nvme_path"] == "/mnt/nvme"
    assert texts["zero++"]["zero_optimization"]["zero_quantized_gradients"] is True
    assert texts["ulysses"]["sequence_parallel_size"] == 8
    assert len({json.dumps(text) for text in texts.values()}) == len(TEMPLATES)


@pytest.mark.parametrize("path", sorted((ROOT / "launch").rglob("*.sh")), ids=lambda path: path.parent.name)
def test_launch_scripts_are_bash(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert path.stat().st_mode & 0o111


def test_a_copy_runs_from_its_own_directory(tmp_path: Path) -> None:
    made = copy_recipe("llama-3.1-8b-sft-zero2-8xh100", tmp_path / "new" / "mine")
    text = (made / "recipe.yaml").read_text()
    assert "extends" not in text
    assert "- `data/train`" in (made / "README.md").read_text()
    original = load_recipe(recipe_path("llama-3.1-8b-sft-zero2-8xh100"))
    copied = load_recipe(made / "recipe.yaml")
    assert (copied.model, copied.cluster, copied.job, copied.layout) == (
        original.model,
        original.cluster,
        original.job,
        original.layout,
    )
    opened = RunDirectory.open(made / "run")
    assert opened.run.data.train == str(made / "data/train")
    with pytest.raises(KitError, match="not overwritten"):
        copy_recipe("llama-3.1-8b-sft-zero2-8xh100", made)
    with pytest.raises(SpecError, match="did you mean"):
        copy_recipe("llama-3.1-8b-sft-zero2", tmp_path / "other")


def test_a_copy_for_trl_has_its_script_and_its_command(tmp_path: Path) -> None:
    page = (copy_recipe("llama-3.1-8b-trl-dpo-zero3-8xh100", tmp_path / "dpo") / "README.md").read_text()
    assert "accelerate.yaml own_script.py trl_dpo.py --model ../models/llama-3.1-8b" in page
    assert "--per_device_train_batch_size 1 " in page  # a pair is two sequences
    assert "kit train" not in page
    assert (tmp_path / "dpo/run/trl_dpo.py").read_text() == (ROOT / "examples/trl_dpo.py").read_text()
    page = (copy_recipe("llama-3.1-8b-trl-sft-zero3-8xh100", tmp_path / "sft") / "README.md").read_text()
    assert "--objective sft --out data/train" in page
    assert "trl_sft.py" in page


def test_an_edited_copy_that_cannot_run_says_why(tmp_path: Path) -> None:
    made = copy_recipe("llama-65b-pretrain-tp8-pp4-800xa100-80", tmp_path / "mine")
    recipe = made / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("global_batch_size: 2000", "global_batch_size: 2048"))
    done = kit("emit", str(recipe), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "2048" in done.stderr
    assert "2000" in done.stderr or "2025" in done.stderr or "2050" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_command_line_lists_and_copies(tmp_path: Path) -> None:
    listed = kit("recipes").stdout
    assert all(f"{name}\n    " in listed for name in recipe_names())
    assert kit("recipes", "copy", "llama-1b-pretrain-amp-1xh100", str(tmp_path / "mine")).returncode == 0
    again = kit("recipes", "copy", "llama-1b-pretrain-amp-1xh100", str(tmp_path / "mine"))
    assert again.returncode == 2
    assert "not overwritten" in again.stderr

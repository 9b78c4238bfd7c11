"""The recipes that come with kit: each plans, is copied, and has its files in a checkout. tests/test_generated.py
compares these with the recipes; test_launch.py hands them to kit lint, planning/test_accepted.py to the engines."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from kit.emit.copy_recipe import copy_recipe
from kit.emit.of_recipe import plan_of_recipe
from kit.emit.run_directory import RunDirectory
from kit.errors import KitError, SpecError
from kit.planner.make_plan import make_plan
from kit.specs.extra import flat
from kit.specs.recipe import load_recipe
from kit.specs.shipped import headline, recipe_names, recipe_path
from scripts import shipped_files
from scripts.shipped_files import TEMPLATES, WAYS
from tests.emit.plans import stand_in
from tests.support import ROOT
from tests.support.refusals import refusal

STOPPABLE = "-m kit.training.interruptible -m"
SAYS = '#!/usr/bin/env bash\necho "$(basename "$0")" "$@"\n'


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


@pytest.fixture(scope="module")
def written(shipped: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes that people wrote, and what kit writes to them today."""
    root = tmp_path_factory.mktemp("shipped")
    shutil.copytree(ROOT / "launch", root / "launch", ignore=shutil.ignore_patterns("run", "README.md"))
    with mock.patch.object(shipped_files, "shipped_files", return_value=shipped):
        shipped_files.write_shipped(root)
    return root


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 sums floats with compensation: other last digits in plan.yaml"
)
@pytest.mark.slow
def test_drift_is_noticed_and_mended(shipped: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_files, "shipped_files", lambda: shipped)
    for folder in ("ds_configs", "launch"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    edited, script = tmp_path / "ds_configs/zero2.json", tmp_path / "launch/slurm/run/launch.sh"
    edited.write_text(edited.read_text().replace('"stage": 2', '"stage": 1'))
    (tmp_path / "ds_configs/zero1.json").unlink()
    (tmp_path / "launch/forgotten.sh").write_text("#!/bin/sh\n")
    shutil.rmtree(script.parent)
    missing = {file.relative_to(ROOT).as_posix() for file in (ROOT / "launch/slurm/run").iterdir()}
    assert set(shipped_files.check(tmp_path)) == {f"{name} is missing" for name in missing} | {
        "ds_configs/zero1.json is missing",
        "ds_configs/zero2.json is not what its recipe says today",
        "launch/forgotten.sh follows from no recipe",
    }
    assert (len(shipped_files.write_shipped(tmp_path)), shipped_files.check(tmp_path)) == (3 + len(missing), [])
    assert (script.stat().st_mode & 0o777, edited.stat().st_mode & 0o777) == (0o755, 0o644)


STARTED = {
    "accelerate": "accelerate launch --config_file accelerate.yaml --module kit.training .",
    "deepspeed": "python -m deepspeed.launcher.runner --hostfile hostfile --master_addr node-0 --master_port 29500 "
    "rank.py .",
    "torchrun": "torchrun --standalone --nproc-per-node 8 -m kit.training .",
    "slurm": "sbatch slurm.sbatch",
    "megatron": f"python {STOPPABLE} torch.distributed.run --nproc-per-node 8 --nnodes 8 --node-rank 0 --master-addr "
    "node-0 --master-port 29500 -m kit.training .",
    "one-gpu": "kit train run",
}
"""Way to start → what its first command ends in."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_way_is_a_whole_run_and_its_first_command_starts_it(name: str, written: Path, tmp_path: Path) -> None:
    made = shutil.copytree(written / "launch" / name, tmp_path / name)
    opened = RunDirectory.open(made / "run")
    assert opened.plan == plan_of_recipe(load_recipe(made / "recipe.yaml"))
    assert (opened.edits, opened.run.data.train) == ((), str(made / "data/train"))
    page = (made / "README.md").read_text()
    assert re.search(r"^kit convert data \S+ --tokenizer \S+ .*# the same for", page, re.MULTILINE)
    start = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    programs = {line.split()[0] for line in start.splitlines()} - {"cd", "NODE_RANK=0", "./launch_hosts.sh"}
    (tmp_path / "bin").mkdir()
    given = stand_in(tmp_path / "bin", **dict.fromkeys({*programs, "python"}, SAYS)) | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(["bash", "-euc", start], cwd=made, env=given, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == STARTED[name]


@pytest.mark.parametrize("name", ["accelerate", "torchrun"])
def test_a_page_tells_a_launcher_what_launch_sh_tells_it(name: str, tmp_path: Path) -> None:
    """Its own words stand around the command of the page: the launcher as a module that Ctrl-C reaches."""
    words = STARTED[name].split()[2:] if name == "accelerate" else STARTED[name].split()[-3:]
    made = shutil.copytree(ROOT / "launch" / name / "run", tmp_path / name)
    given = stand_in(tmp_path, python=SAYS)
    done = subprocess.run([made / "launch.sh"], env=given, text=True, capture_output=True, check=True)
    assert " ".join(words) in done.stdout
    assert ("--nproc-per-node 8" in done.stdout) == (name == "torchrun")
    assert yaml.safe_load((made / "accelerate.yaml").read_text())["num_processes"] == 8


@pytest.mark.slow
def test_templates_have_their_disk_and_a_reason_for_every_key(shipped: dict[str, str]) -> None:
    """The disk is a placeholder, which a run directory has from its recipe."""
    for template in TEMPLATES:
        config, page = (shipped[f"ds_configs/{template.name}.{suffix}"] for suffix in ("json", "md"))
        reasons = dict(re.findall(r"^\| `([\w.]+)` \| `.*?` \| (.+) \|$", page, re.MULTILINE))
        disk = {f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")}
        assert reasons.keys() == flat(json.loads(config)).keys() - disk
        assert f"| [{template.name}]({template.name}.json) |" in shipped["ds_configs/README.md"]
    assert reasons["sequence_parallel_size"].startswith("layout.cp")
    zero = json.loads(shipped["ds_configs/zero-infinity-nvme.json"])["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == "/mnt/nvme"
    assert '| `optimizer.params.lr` | `"auto"` | the Trainer: `--learning_rate` |' in shipped["ds_configs/zero2.md"]


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
    made = copy_recipe(SFT, tmp_path / "mine")
    text = (made / "recipe.yaml").read_text()
    assert "extends" not in text
    assert text.startswith(f"# {headline(recipe_path(SFT))}\n# A copy of kit's {SFT}: change it, then kit emit")
    original, copied = load_recipe(recipe_path(SFT)), load_recipe(made / "recipe.yaml")
    assert [
        part for part in ("model", "cluster", "job", "layout") if getattr(copied, part) != getattr(original, part)
    ] == []
    assert RunDirectory.open(made / "run").run.data.train == str(made / "data/train")
    for name, place, error, said in (
        (SFT, made, KitError, "exists already and is not overwritten; choose another directory"),
        (SFT.removesuffix("-8xh100"), tmp_path / "other", SpecError, "did you mean"),
        (SFT, made / "README.md" / "x", KitError, "cannot be written: Not a directory"),
    ):
        assert re.search(said, refusal(error, copy_recipe, name, place))
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


PAGES: dict[str, tuple[list[str], list[str]]] = {
    # recipe → what the page of its copy says, in this order, and what it does not say
    SFT: (
        ["- `data/train`\n- `data/validation`\n- `models/llama-3.1-8b`\n",
         "kit convert data rows/*.jsonl --tokenizer models/llama-3.1-8b --objective sft --out data/train",
         "\nkit train run   "], ["trl"]),
    "llama-3-70b-pretrain-64xh100": (
        ["text/*.jsonl --tokenizer", "cd run && sbatch slurm.sbatch"], ["--objective", "\nkit train run  "]),
    DPO: (
        ["cd run && accelerate launch --config_file accelerate.yaml own_script.py trl_dpo.py --model "
         "../models/llama-3.1-8b --preferences ../data/preferences.jsonl --output_dir out --bf16 true ",
         "--per_device_train_batch_size 1 "], ["kit train"]),  # a pair is two sequences
    "llama-3.1-8b-trl-sft-zero3-8xh100": (
        ["With TRL's trainer:",
         "trl_sft.py --model ../models/llama-3.1-8b --chats ../data/chats.jsonl --output_dir out",
         "With kit's own loop:", "--objective sft --out data"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_copy_says_how_to_go_on(name: str, tmp_path: Path) -> None:
    made = copy_recipe(name, tmp_path / "mine")
    page, (said, unsaid) = (made / "README.md").read_text(), PAGES[name]
    places = [page.find(part) for part in said]
    assert (min(places) >= 0, places) == (True, sorted(places))
    assert [part for part in unsaid if part in page] == []
    assert [
        script.name
        for script in (made / "run").glob("trl_*.py")
        if script.read_text() != (ROOT / "examples" / script.name).read_text()
    ] == []
    assert (made / "run/trl_dpo.py").is_file() == (name == DPO)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.emit.copy_recipe.plan_of_recipe", lambda *_: 1 / 0)
    refusal(ZeroDivisionError, copy_recipe, SFT, tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []

"""A configuration of another program is no recipe: kit says whose it is, and what it can do with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import SpecError
from kit.specs.recipe import load_recipe

AXOLOTL = "base_model: NousResearch/Llama-3.2-1B\ndatasets: [{path: a/b, type: alpaca}]\nmicro_batch_size: 2\n"
FILES = {
    AXOLOTL: ("axolotl", "kit plan llama-3.2-1b --gpus 8xH100"),
    f"{AXOLOTL}deepspeed: deepspeed_configs/zero3.json\n": ("axolotl", "kit lint deepspeed_configs/zero3.json judges"),
    "model_name_or_path: meta-llama/Llama-3.1-8B-Instruct\nstage: sft\n": ("LLaMA-Factory", "kit plan llama-3.1-8b "),
    "model_name_or_path: gpt2\nlearning_rate: 1.0e-4\n": ("TRL or the Hugging Face Trainer", "kit plan gpt2 --gpus"),
    "distributed_type: FSDP\nnum_processes: 2\n": ("accelerate", "kit lint FILE judges it"),
    "model: Qwen/Qwen3-8B\ntrain_type: lora\n": ("ms-swift", "kit plan qwen3-8b --gpus"),
    "apiVersion: batch/v1\nkind: Job\n": ("Kubernetes", "kit lint FILE judges it"),
    "optimizer_name: adam\nepoch_count: 3\n": ("no program that kit knows has these keys", "kit plan llama-3.1-8b"),
}


@pytest.mark.parametrize("text", FILES)
def test_the_program_is_named_with_a_command_that_works(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_recipe(path)
    assert "other.yaml: no recipe: " in str(caught.value)
    for words in FILES[text]:
        assert words.replace("FILE", str(path)) in str(caught.value)


@pytest.mark.parametrize("text", ["modle: gpt2\nclustr: 8xH100\n", "model: gpt2\n", "cluster: 8xH100\n", "{}"])
def test_a_recipe_with_mistakes_stays_a_recipe(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SpecError, match="is required and missing"):
        load_recipe(tmp_path / "mine.yaml")


def kit(*words: str) -> tuple[int, str]:
    run = subprocess.run([sys.executable, "-m", "kit", *words], capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


def test_plan_and_lint_say_what_they_did_not_read(tmp_path: Path) -> None:
    path, script, ours = tmp_path / "axolotl.yaml", tmp_path / "swift.sh", tmp_path / "ours.sh"
    path.write_text(AXOLOTL)
    script.write_text("NPROC_PER_NODE=8 \\\nswift sft --model Qwen/Qwen2.5-7B\n")
    ours.write_text("torchrun --nproc_per_node 8 t.py\nswift export --model a\n")
    for command in ("plan", "memory", "explain"):
        code, said = kit(command, str(path), "--gpus", "8xH100")
        assert code == 2
        assert "no recipe: it looks like a configuration of axolotl" in said
    assert kit("lint", str(path))[0] == kit("lint", str(script))[0] == 2
    assert "swift.sh:1: warning: [not-read] what swift starts is not read" in kit("lint", str(script))[1]
    code, said = kit("lint", str(ours), str(path))
    assert code == 0
    assert "ours.sh:2: note: [not-read]" in said

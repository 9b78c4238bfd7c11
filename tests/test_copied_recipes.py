"""A shipped recipe as a new user meets it: copied, edited, started too early. One line, exit code 2, no process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kit.cli
from kit.emit.copy_recipe import copy_recipe
from tests.emit.plans import CONFIG
from tests.support.in_process import kit_refusal


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_recipe("llama-3.1-8b-sft-zero3-8xa100-80", tmp_path / "mine")


def test_a_recipe_that_is_trained_too_early_says_how_to_go_on(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied / "mine"
    said = kit_refusal(["train", str(copied / "recipe.yaml"), "--out", str(run)])
    for part in (
        "no config.json there; give a Hugging Face model directory",
        "train.bin is missing; write the pair with: kit convert data TEXT", "run.data.train=", "run.data.validation=",
        f"{run} is written; once this is mended: kit train {run}",
    ):  # fmt: skip
        assert part in said
    monkeypatch.chdir(copied)
    assert "mended" not in kit_refusal(["train", run.name])


def test_a_plan_of_a_directory_with_weights_starts_from_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 4096}))
    asked = ["plan", str(tmp_path), "--gpus", "1xH100"]
    assert "kit train" not in CliRunner().invoke(kit.cli.app, asked).output
    (tmp_path / "model.safetensors").touch()
    assert f"kit train {tmp_path} --data text.jsonl" in CliRunner().invoke(kit.cli.app, asked).output


def test_a_tokenizer_that_is_not_there(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "text.txt").write_text("a few words\n")
    words = ["convert", "data", "text.txt", "--tokenizer", "models/absent", "--out", "train"]
    monkeypatch.chdir(copied)
    assert "models/absent" in kit_refusal(words)
    assert not (copied / "train.bin").exists()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            "{engine: deepspeed, zero_stage: 3, micro_batch_size: 3}",
            "micro_batch_size·dp=3·8 does not divide global_batch_size=128",
        ),
        ("{engine: deepspeed, zero_stage: 0}", "does not fit on 8 x A100-80"),
        ("{engine: megatron, tp: 3}", "tp=3"),
        ("{engine: deepspeed, zero_stage: 4}", "zero_stage"),
        ("{engine: deepspeed, zero_stages: 3}", "zero_stage"),
    ],
)
def test_a_layout_that_cannot_be(
    copied: Path, edit: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = copied / "recipe.yaml"
    head, _, _ = recipe.read_text().partition("\nlayout:")
    recipe.write_text(f"{head}\nlayout: {edit}\n")
    assert said in kit_refusal(["emit", str(recipe), "--out", str(copied / "run2")])
    assert not (copied / "run2").exists()

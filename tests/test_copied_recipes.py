"""A shipped recipe as a new user meets it: copied, edited, started too early. One line, exit code 2, no process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kit.cli
from tests.test_bad_input import answer

NAME = "llama-3.1-8b-sft-zero3-8xa100-80"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", ["kit", "recipes", "copy", NAME, str(tmp_path / "mine")])
    with pytest.raises(SystemExit) as ended:
        kit.cli.main()
    assert ended.value.code == 0
    return tmp_path / "mine"


def test_model_and_data_that_are_not_there(copied, capsys, monkeypatch):
    said = answer(["train", str(copied / "run")], capsys, monkeypatch)
    assert "run.model_path=" in said
    assert "no config.json there; give a Hugging Face model directory" in said
    assert "run.data.train=" in said
    assert "train.bin is missing; write the pair with: kit convert data TEXT" in said
    assert "run.data.validation=" in said


def test_a_recipe_that_is_trained_too_early_says_how_to_go_on(copied, capsys, monkeypatch):
    run = copied / "mine"
    said = answer(["train", str(copied / "recipe.yaml"), "--out", str(run)], capsys, monkeypatch)
    assert f"{run} is written; once this is mended: kit train {run}" in said
    monkeypatch.chdir(copied)
    assert "mended" not in answer(["train", run.name], capsys, monkeypatch)


def test_a_plan_of_a_directory_with_weights_starts_from_them(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["plan", str(tmp_path), "--gpus", "1xH100"]
    assert "run.model_path" not in CliRunner().invoke(kit.cli.app, asked).output
    (tmp_path / "model.safetensors").touch()
    assert f"run.model_path={tmp_path}" in CliRunner().invoke(kit.cli.app, asked).output


def test_a_tokenizer_that_is_not_there(copied, capsys, monkeypatch):
    text = copied / "text.txt"
    text.write_text("a few words\n")
    words = ["convert", "data", str(text), "--tokenizer", str(copied / "models/absent"), "--out", str(copied / "train")]
    said = answer(words, capsys, monkeypatch)
    assert "models/absent" in said
    assert not (copied / "train.bin").exists()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            "layout: {engine: deepspeed, zero_stage: 3, micro_batch_size: 3}",
            "micro_batch_size·dp=3·8 does not divide global_batch_size=128",
        ),
        ("layout: {engine: deepspeed, zero_stage: 0}", "does not fit on 8 x A100-80"),
        ("layout: {engine: megatron, tp: 3}", "tp=3"),
        ("layout: {engine: deepspeed, zero_stage: 4}", "zero_stage"),
        ("layout: {engine: deepspeed, zero_stages: 3}", "zero_stage"),
    ],
)
def test_a_layout_that_cannot_be(copied, edit, said, capsys, monkeypatch):
    recipe = copied / "recipe.yaml"
    head, _, _ = recipe.read_text().partition("\nlayout:")
    recipe.write_text(f"{head}\n{edit}\n")
    assert said in answer(["emit", str(recipe), "--out", str(copied / "run2")], capsys, monkeypatch)
    assert not (copied / "run2").exists()

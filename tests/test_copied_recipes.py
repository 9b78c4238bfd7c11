"""A shipped recipe as a new user meets it: copied, edited, started too early. One line, exit code 2, no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.emit.copy_recipe import copy_recipe
from tests.support.in_process import kit_refusal


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_recipe("llama-3.1-8b-sft-zero3-8xa100-80", tmp_path / "mine")


def test_a_recipe_that_is_trained_too_early_says_how_to_go_on(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied / "mine"
    said = kit_refusal(["train", str(copied / "recipe.yaml"), "--out", str(run)])
    assert [
        part for part in (
            "no config.json there; give a Hugging Face model directory",
            "train.bin is missing; write the pair with: kit convert data TEXT",
            "run.data.train=", "run.data.validation=",
            f"{run} is written; once this is mended: kit train {run}",
        ) if part not in said
    ] == [], said  # fmt: skip
    monkeypatch.chdir(copied)
    assert "mended" not in kit_refusal(["train", run.name])


def test_a_tokenizer_that_is_not_there(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "text.txt").write_text("a few words\n")
    words = ["convert", "data", "text.txt", "--tokenizer", "models/absent", "--out", "train"]
    monkeypatch.chdir(copied)
    assert "models/absent" in kit_refusal(words)
    assert not (copied / "train.bin").exists()

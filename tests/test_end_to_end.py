"""The README's road through the command line: emit, train, stop, resume, convert; and what it refuses on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kit.training.__main__ import main as worker
from tests.support import ROOT
from tests.support.assets import RECIPE, prepare
from tests.support.in_process import kit_main, kit_refusal
from tests.support.refusals import refusal

STEPS, STOPPED = 6, 5


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after three steps, in this process, and was resumed from the command line for two more."""
    prepare()
    out = tmp_path_factory.mktemp("runs") / "run"
    words = [f"run.steps={STEPS}", "run.checkpoint.every_steps=2"]
    assert kit_main("emit", str(RECIPE), *words, "--out", str(out)).code == 0
    assert worker([str(out), "--stop-at-step", "3"]) == 0
    assert max(losses(out)) == 3
    command = [sys.executable, "-m", "kit", "train", str(out), "--resume", "auto", "--stop-at-step", str(STOPPED)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert (done.returncode, "Traceback" in done.stderr + done.stdout) == (0, False), done.stdout + done.stderr
    return out


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert "started" in refusal(
        AssertionError, kit_main, "train", str(RECIPE), f"run.steps={STEPS}", "--out", str(whole)
    )
    assert worker([str(whole)]) == 0
    expected = losses(whole)
    assert [*expected] == [*range(1, STEPS + 1)]
    assert losses(run) == {step: expected[step] for step in range(1, STOPPED + 1)}


def test_the_export_loads_with_plain_transformers(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = tmp_path / "hf"
    model = prepare().model
    words = ["convert", "model", str(run / "checkpoints" / f"step-{STOPPED:08d}"), "--out", str(exported)]
    assert kit_main(*words, "--dtype", "float32", "--extras-from", str(model)).code == 0
    loaded = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    assert loaded.num_parameters() == AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert AutoTokenizer.from_pretrained(exported, local_files_only=True)("import os").input_ids
    assert str(exported) in kit_refusal(words)


def test_a_run_directory_is_trained_where_it_is(run: Path, tmp_path: Path) -> None:
    assert "is trained where it is; omit --out" in kit_refusal(["train", str(run), "--out", str(tmp_path / "x")])

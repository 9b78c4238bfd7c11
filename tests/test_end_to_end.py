"""The README's road through the command line: emit, train, stop, resume, convert; and what it refuses on the way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kit.cli as kit_cli
from tests.support.assets import RECIPE, prepare
from tests.support.in_process import kit_refusal

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6


def kit(*words: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kit", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    return done


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, stopped after three and resumed."""
    prepare()
    out = tmp_path_factory.mktemp("runs") / "run"
    words = [f"run.steps={STEPS}", "run.checkpoint.every_steps=2"]
    kit("emit", RECIPE, *words, "--out", out)
    kit("train", out, "--stop-at-step", "3")
    assert max(losses(out)) == 3
    kit("train", out, "--resume", "auto")
    return out


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    kit("train", RECIPE, f"run.steps={STEPS}", "--out", whole)
    assert losses(run) == losses(whole)
    assert len(losses(run)) == STEPS


def test_the_export_loads_with_plain_transformers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in this process, which has imported what a new one would import for seconds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = tmp_path / "hf"
    model = prepare().model
    step = run / "checkpoints" / f"step-{STEPS:08d}"
    words = ["convert", "model", step, "--out", exported, "--dtype", "float32", "--extras-from", model]
    monkeypatch.setattr("sys.argv", ["kit", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        kit_cli.main()
    assert ended.value.code == 0
    loaded = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    assert loaded.num_parameters() == AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert AutoTokenizer.from_pretrained(exported, local_files_only=True)("import os").input_ids
    capsys.readouterr()
    assert str(exported) in kit_refusal(["convert", "model", str(step), "--out", str(exported)])


def test_a_run_directory_is_trained_where_it_is(run: Path, tmp_path: Path) -> None:
    assert "is trained where it is; omit --out" in kit("train", run, "--out", tmp_path / "x", ok=False).stderr


@pytest.mark.nightly
def test_a_truncated_checkpoint_is_refused_before_training(run: Path, tmp_path: Path) -> None:
    step = tmp_path / "step"
    shutil.copytree(run / "checkpoints" / f"step-{STEPS:08d}", step)
    victim = next(step.glob("exp_avg/*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-100])
    fresh = tmp_path / "fresh"
    kit("emit", RECIPE, "--out", fresh)
    done = kit("train", fresh, "--resume", step, ok=False)
    assert victim.name in done.stderr
    assert not (fresh / "metrics.jsonl").exists()

"""The first hour: what ``kit plan`` and ``kit train`` print next, typed as printed, ends in a trained model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from kit.specs.recipe import load_recipe
from kit.training.data.chat_template import read_chat_template
from tests.support import ROOT
from tests.support.assets import prepare
from tests.support.files import files_in
from tests.support.in_process import kit_main, kit_refusal

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"def f{n}"},
            {"role": "assistant", "content": "return 1\n" * (n % 7 + 1)},
        ]
    }
    for n in range(20)
]
JOB = ("--objective", "sft", "--seq-length", "128", "--precision", "fp32")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a new user: a model with a chat template, and chats."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(prepare().model, tmp_path / "model")
    chats = "".join(json.dumps(row) + "\n" for row in CHATS)
    return files_in(tmp_path, {
        "model/chat_template.jinja": read_chat_template("plain"), "chats.jsonl": chats, "other/tokenizer.json": "{}",
    })  # fmt: skip


def typed(line: str, home: Path) -> str:
    """What a shell says of the line; it ends well."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"HOME": str(home), "PATH": places, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **own}, timeout=240, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def commands(text: str) -> list[str]:
    """The lines of a text that are commands, without the page, which does not end."""
    return [line.split("   kit ui")[0] for line in re.findall(r"^(?:  next)?\s+(kit (?!ui).*)$", text, re.MULTILINE)]


def answered(line: str) -> str:
    """What a line that starts no process says, in this process."""
    done = kit_main(*shlex.split(line)[1:])
    assert done.code == 0, f"{line}\n{done.err}"
    return done.out


def test_the_printed_lines_end_in_a_trained_model(here: Path) -> None:
    """A shell reads the lines that train, the first of them stopped on its way; the others are the same words."""
    planned = kit_main("plan", "model", "--gpus", "local", *JOB)
    assert "\n  1B tok    in full sequences: " in planned.out
    *looked, train = commands(planned.out)
    assert [answered(line).startswith("model, 328k parameters") for line in looked] == [True, True]
    stopped = typed(f"{train} --stop-at-step 20", here)
    assert [part in stopped for part in ("20 rows for sft", "3 epochs, 30 steps")] == [True, True]
    said = typed("kit train runs/a --resume auto", here)
    assert "resumed after step 20" in said
    assert "is trained where it is; omit --out" in kit_refusal(["train", "runs/a", "--out", "x"])
    run = here / "runs" / "a"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 30
    assert losses[-1] < losses[0]
    assert f"trained, loss {losses[-1]:.4f}" in said
    after = commands(said)
    assert [shlex.split(line)[:2] for line in after] == [["kit", "generate"], ["kit", "convert"]]
    generated, *_ = map(answered, (*after, f"{after[1]}-2 --extras-from other"))
    assert generated.startswith("Hello\n")
    exported, trained = (
        {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for place in (here / "runs" / "a-model", run / "checkpoints" / "step-00000030" / "model")
    )
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name].bfloat16()) for name in exported)
    assert {"tokenizer.json", "chat_template.jinja"} <= {path.name for path in (here / "runs" / "a-model").iterdir()}
    assert (here / "runs" / "a-model-2" / "tokenizer.json").read_text() == "{}"
    again = load_recipe(run / "recipe.yaml")
    assert (again.job.seq_length, again.run and again.run.data.train) == (128, str(here / "chats.jsonl"))


def test_a_dry_run_writes_everything_and_starts_nothing(here: Path) -> None:
    asked = ("train", "model", "--data", "chats.jsonl", "--gpus", "2xH100", "--dry-run")
    assert kit_main(*asked, "--lora").out.endswith("start it: kit train runs/model-sft\n")
    run, plan = (yaml.safe_load((here / "runs/model-sft" / name).read_text()) for name in ("run.yaml", "plan.yaml"))
    assert run["schedule"]["warmup_steps"] == 0.03
    assert Path(here / "runs/model-sft" / f"{run['data']['train']}.idx").resolve().exists()
    asked_for = {name: plan["job"][name] for name in ("epochs", "learning_rate", "seq_length", "global_batch_size")}
    # the model has 256 positions, and there are 20 rows
    assert asked_for == {"epochs": 3, "learning_rate": 2e-4, "seq_length": 256, "global_batch_size": 2}
    assert "tokenised before" in kit_main(*asked).out
    assert (here / "runs/model-sft-2/recipe.yaml").exists()
    edited = kit_main("train", "runs/model-sft/recipe.yaml", "job.epochs=1", "--dry-run")
    assert edited.out.endswith("start it: kit train runs/model-sft-3\n")
    assert yaml.safe_load((here / "runs/model-sft-3/plan.yaml").read_text())["job"]["epochs"] == 1
    assert len(list((here / "runs/tokenised").glob("*.idx"))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model", "--lora"], "--data is missing"),
        (["model", "--gpus", "8xH100"], "--data is missing"),
        (["model"], "a model trains on rows: kit train model --data FILE.jsonl"),
        (["model", "chats.jsonl", "job.epochs=3"], "rows are named by it: kit train model --data chats.jsonl"),
        (["model", "--data", "chats.jsonl", "--out", "model"], "model exists already and is not overwritten"),
        (
            ["model", "--data", "chats.jsonl", "--lr", "1"],
            "--lr is not an option of kit train: write job.learning_rate=…",
        ),
        (["model", "--data", "chats.jsonl", "--weight-decay=0"], "write job.optimizer.weight_decay=…"),
        (["--model", "model", "--dataset", "chats.jsonl"], "write the model as the first argument"),
        (["model", "--data", "chats.jsonl", "--objective", "dpo"], "TRL's trainer trains it"),
        (["qwen3-8b"], "a model trains on rows: kit train qwen3-8b --data FILE.jsonl"),
        (["model", "--data", "absent.jsonl"], "absent.jsonl does not exist"),
        (["model", "--data", "chats.jsonl", "--gpus", "1xH100", "job.seq_lenght=4"], "seq_length"),
        (["13B", "--data", "chats.jsonl"], "no weights to start from"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(here: Path, words: list[str], said: str) -> None:
    assert said in kit_refusal(["train", *words])
    assert {path.name for path in here.iterdir()} == {"model", "chats.jsonl", "other"}

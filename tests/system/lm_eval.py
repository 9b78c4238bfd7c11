"""lm-eval on checkpoints of a run, offline, by the commands of docs/training.md.

    python -m tests.system.lm_eval

A tiny Llama learns the phrases of HTTP's client errors (Python's ``http.HTTPStatus``) as text. A task on a local file
asks for them with three wrong choices each. lm-eval must find that the weights before training guess, that those of a
stopped run know more, and that those of the finished run know nearly all. lm-eval has an environment of its own, which
borrows torch and transformers from this one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from http import HTTPStatus
from pathlib import Path

from tests.support import readers
from tests.support.assets import RECIPE, ROOT, prepare
from tests.support.program import run

ENVIRONMENT = ROOT / ".venv" / "lm-eval"
PACKAGES = (
    *("lm-eval==0.4.13", "evaluate", "sacrebleu", "rouge-score", "sqlitedict", "zstandard", "word2number"),
    *("--constraint", str(ROOT / "constraints.txt")),
)
STEPS, STOPPED_AT = 150, 80
EPOCHS = 120
GUESSED, KNOWN = 0.5, 0.9
"""Accuracy that weights without training stay below, and that of the finished run at least."""
TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""


def main() -> int:
    """0 where lm-eval says so."""
    python, assets = readers.environment(ENVIRONMENT, whole=PACKAGES), prepare()
    with tempfile.TemporaryDirectory(prefix="kit-lm-eval-") as scratch:
        place = Path(scratch)
        _write_text_and_task(place)
        _kit("convert", "data", "text.jsonl", "--tokenizer", str(assets.model), "--out", "text", at=place)
        given = [f"run.data.train={place / 'text'}", "run.data.validation=null", f"run.steps={STEPS}"]
        given += [f"run.model_path={assets.model}", "job.seq_length=64", "job.global_batch_size=16"]
        _kit("emit", str(RECIPE), *given, "--out", "run", at=place)
        found = {"before training": _accuracy(python, place, assets.model)}
        for options in (["--stop-at-step", str(STOPPED_AT)], ["--resume", "auto"]):
            _kit("train", "run", *options, at=place)
            newest = sorted((place / "run" / "checkpoints").glob("exchange-step-*"))[-1]
            model = place / f"model-{newest.name}"
            _kit("convert", "model", str(newest), "--out", str(model), "--extras-from", str(assets.model), at=place)
            found[f"at step {int(newest.name[-8:])}"] = _accuracy(python, place, model)
    print(*(f"accuracy {when}: {accuracy:.2f}" for when, accuracy in found.items()), sep="\n")
    before, stopped, ended = found.values()
    print(f"guessing is 0.25; below {GUESSED} before, more at the stop than before, at least {KNOWN} at the end")
    return int(not (before < GUESSED and before < stopped <= ended and ended >= KNOWN))


def _write_text_and_task(place: Path) -> None:
    draw, rows = random.Random(0), place / "rows.jsonl"
    facts = [(f"HTTP status {each.value} means", each.phrase) for each in HTTPStatus if 400 <= each < 500]
    text = [{"text": " ".join(fact)} for _ in range(EPOCHS) for fact in draw.sample(facts, len(facts))]
    (place / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in text), encoding="utf-8")
    asked = []
    for question, answer in facts:
        choices = [answer, *draw.sample([other for _, other in facts if other != answer], 3)]
        draw.shuffle(choices)
        asked.append({"q": question, "choices": choices, "gold": choices.index(answer)})
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in asked), encoding="utf-8")
    (place / "tasks").mkdir()
    (place / "tasks" / "mine.yaml").write_text(TASK.format(rows=rows), encoding="utf-8")


def _kit(*words: str, at: Path) -> None:
    _quietly([sys.executable, "-m", "kit", *words], at, PYTHONPATH=str(ROOT))


def _quietly(command: list[str], at: Path, **variables: str) -> None:
    """Run a program; print what it said only if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")


def _accuracy(python: Path, place: Path, model: Path) -> float:
    """What lm-eval says of a Hugging Face directory."""
    out = place / f"results-{model.name}"
    words = ["run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks", "mine"]
    words += ["--include_path", "tasks", "--device", "cpu", "--batch_size", "16", "--output_path", str(out)]
    _quietly([str(python.with_name("lm-eval")), *words], place, HF_HUB_OFFLINE="1", HF_HOME=str(place / "cache"))
    (results,) = out.rglob("results_*.json")
    return float(json.loads(results.read_text(encoding="utf-8"))["results"]["mine"]["acc,none"])


if __name__ == "__main__":
    run(main)

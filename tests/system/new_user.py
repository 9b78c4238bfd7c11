"""A shipped recipe copied, edited for this machine and run, as its README says: ``python -m
tests.system.new_user``.

The model is a tiny one and the machine one CPU process; everything else is what a person would type. Fails where a
command does, or the trained model does not load in transformers or is not better than what it started from.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

from kit.rehearsal.processes import metrics
from tests.system.examples.cases import start
from tests.system.examples.inputs import prepare

NAME = "llama-1b-pretrain-amp-1xh100"
STEPS = 12
LIMIT_S = 600
EDITS = {
    "model: llama-3.2-1b": "model: models/tiny",
    "cluster: 1xH100": "cluster: 1xcpu",
    "  seq_length: 4096": "  seq_length: 64",
    "  global_batch_size: 128": "  global_batch_size: 8",
    "  total_tokens: ": "  # total_tokens: ",
    "run:\n": f"run:\n  model_path: models/tiny\n  steps: {STEPS}\n  checkpoint: {{every_steps: 4}}\n",
}


def main() -> int:
    """0 where the whole way works."""
    with tempfile.TemporaryDirectory(prefix="kit-new-user-") as scratch:
        place = Path(scratch)
        _kit(place, "recipes", "copy", NAME, "mine")
        mine = place / "mine"
        assets = prepare()
        shutil.copytree(assets / "model", mine / "models" / "tiny")
        edit(mine / "recipe.yaml")
        for name in ("train", "validation"):
            _kit(mine, "convert", "data", assets / "text.txt", "--tokenizer", "models/tiny", "--out", f"data/{name}")
        _kit(mine, "plan", "recipe.yaml")
        overrides = ("job.learning_rate=1e-3", "layout.micro_batch_size=4", "run.checkpoint.every_steps=6")
        _kit(mine, "train", "recipe.yaml", *overrides, "--out", "run2", "--stop-at-step", 8)
        _kit(mine, "train", "run2", "--resume", "auto")
        _kit(mine, "convert", "model", f"run2/checkpoints/step-{STEPS:08d}", "--out", "trained")
        # Steps repeated after the resume count once.
        losses = [*{row["step"]: row["loss"] for row in metrics(mine / "run2")}.values()]
        loaded = AutoModelForCausalLM.from_pretrained(mine / "trained", local_files_only=True).num_parameters()
        print(f"{STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; {loaded:,} parameters load")
        return 0 if len(losses) == STEPS and losses[-1] < losses[0] else 1


def edit(recipe: Path) -> None:
    """Edits the recipe as a person would: another model, machine and size."""
    text = recipe.read_text(encoding="utf-8")
    for before, after in EDITS.items():
        assert before in text, f"{before!r} is not in the copy of {NAME}"
        text = text.replace(before, after, 1)
    recipe.write_text(text, encoding="utf-8")


def _kit(place: Path, *words: object) -> None:
    command = [*map(str, words)]
    print("$ kit " + shlex.join(command), flush=True)
    done = start([sys.executable, "-m", "kit", *command], place, LIMIT_S)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {done.stdout[-1000:]}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())

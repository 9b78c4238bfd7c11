"""``examples/speedrun.sh cpu`` from nothing, and what it must come to: ``python -m tests.system.speedrun``.

Both runs learn: the held-out loss at the end is below the first step's by more than noise. The model loads in
transformers and prefers the held-out answers to what the pretrained one makes of them. ``--out`` looks at a run of the
script that is there already.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.rehearsal.processes import metrics
from tests.support import ROOT
from tests.support.program import run

LEARNED = {"pretrained": 1.0, "chatted": 0.4}
"""Run → nats by which its held-out loss is below the loss of its first step."""


def main(out: Annotated[Path | None, typer.Option(help="a folder that examples/speedrun.sh cpu wrote")] = None) -> int:
    """0 where both runs learned and the answers got likelier."""
    with tempfile.TemporaryDirectory(prefix="kit-speedrun-") as scratch:
        if out is None:
            out = Path(scratch) / "speedrun"
            environment = os.environ | {"OUT": str(out)}
            subprocess.run(["bash", "examples/speedrun.sh", "cpu"], cwd=ROOT, env=environment, check=True)
        return _judge(out)


def _judge(out: Path) -> int:
    passed = True
    for name, nats in LEARNED.items():
        rows = metrics(out / name)
        first = next(row["loss"] for row in rows if "loss" in row)
        last = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None][-1]
        passed &= last < first - nats
        print(f"{name}: loss {first:.2f} at first, {last:.2f} held out at the end (at least {nats} less)")
    before, after = (_loss_of_answers(out / name, out / "chats-validation.jsonl") for name in ("base", "model"))
    print(f"held-out answers in transformers: {before:.2f} before the chats, {after:.2f} after")
    return 0 if passed and after < before else 1


def _loss_of_answers(model_path: Path, rows: Path) -> float:
    """Mean loss of a held-out chat's tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_path), AutoModelForCausalLM.from_pretrained(model_path)
    chats = [json.loads(line)["messages"] for line in rows.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    tokens = [tokenizer(text, return_tensors="pt").input_ids[:, :128] for text in texts]
    with torch.no_grad():
        return statistics.fmean(float(model(each, labels=each).loss) for each in tokens)


if __name__ == "__main__":
    run(main)

"""What kit answers and emits today, in short: ``python -m tests.support.answers`` (``make golden``) writes it.

A move of code changes nothing in tests/golden/answers.json. A correction changes the lines that it is about, and its
commit says which. Numbers and first lines say what changed; a digest is of all that is printed or written.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from typer.testing import CliRunner

from kit.cli import app
from kit.emit.run_directory import files_of
from kit.specs.layout import describe
from kit.specs.shipped import recipe_names
from scripts.shipped_files import shipped_plan
from tests.support import ROOT

ANSWERS = ROOT / "tests" / "golden" / "answers.json"
QUESTIONS = (
    "plan llama-3.2-1b --gpus 1xRTX-4090",
    "plan llama-3.1-8b --gpus 1xRTX-4090",
    "plan llama-3.1-8b --gpus 1xRTX-4090 --qlora --objective sft",
    "plan llama-3.1-8b --gpus 8xH100 --total-tokens 20B",
    "plan llama-3.1-8b --gpus 8xH100 --objective sft --epochs 3",
    "plan llama-3.1-8b --gpus 8xA100-40 --objective dpo --lora",
    "plan llama-3.1-8b --gpus 8xH100 --objective grpo",
    "plan llama-3.1-8b --gpus 8xH100 --precision fp8",
    "plan llama-3.1-8b --gpus 8xH100 --seq-length 131072 --global-batch-size 16",
    "plan llama-3.1-8b --gpus 2x8xH100 --optimizer muon",
    "plan llama-3.1-8b --gpus 8xH100 --engine deepspeed",
    "plan llama-3.1-8b --gpus 8xH100 --engine megatron layout.tp=4 layout.pp=2",
    "plan llama-3-70b --gpus 8x8xH100 --total-tokens 1T",
    "plan llama-3-70b --gpus 1x8xA100-80 --objective sft",
    "plan llama-3-70b --gpus 4xH100 --qlora",
    "plan llama-3.1-405b --gpus 64x8xH100",
    "plan mixtral-8x7b --gpus 4x8xH100",
    "plan qwen3-30b-a3b --gpus 2x8xH200",
    "plan glm-4.5 --gpus 32x8xH100",
    "plan deepseek-v3 --gpus 64x8xH100",
    "plan gemma-2-9b --gpus 8xA100-80",
    "plan gpt2 --gpus 4xT4 --precision fp16",
    "plan qwen2.5-14b --gpus 8xA100-40 --objective sft",
    "plan qwen3-8b --clusters 8xH100,8xA100-80,8xRTX-4090 --total-tokens 20B",
    "plan qwen3-8b --total-tokens 20B --budget 5000 --by time",
    "explain llama-3.1-8b --gpus 8xH100 layout.tp=2",
    "memory llama-3.1-8b --gpus 8xH100",
    "memory llama-3.1-405b --gpus 1xH100",
    "memory --largest --gpus 1xRTX-4090",
    "recipes list",
)
LINES = 12


def answer(question: str) -> dict[str, Any]:
    """The first lines of what a command prints, and the digest of all of it, as text and as JSON."""
    done = [CliRunner().invoke(app, [*question.split(), *json_too]) for json_too in ((), ("--json",))]
    lines = [line.rstrip() for line in done[0].stdout.splitlines() if line.strip()]
    return {"says": lines[:LINES], "digest": _digest(*(f"{each.exit_code} {each.stdout}" for each in done))}


def shipped(name: str) -> dict[str, Any]:
    """Of a recipe: layout, numbers, and digests of the prediction and of each file that is emitted."""
    plan = shipped_plan(name)
    if plan is None:
        return {}
    files = {file: _digest(text) for file, text in sorted(files_of(plan).items())}
    return {
        "layout": describe(plan.layout),
        "peak_gib": max(stage.peak_gib for stage in plan.predicted.memory),
        "tokens_per_s": plan.predicted.tokens_per_s,
        "digest": _digest(repr(plan.predicted)),
        "files": files,
    }


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main() -> None:
    """Write the answers of today."""
    found = {
        "questions": {question: answer(question) for question in QUESTIONS},
        "recipes": {name: shipped(name) for name in recipe_names()},
    }
    ANSWERS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What a command prints with ``--json`` is what its schema says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from kit.cli import app
from kit.cli.answers import all_answers, json_schema
from tests.support.assets import prepare
from tests.support.files import files_in
from tests.support.refusals import refusal

RECIPE, LARGER = (
    str(Path(__file__).resolve().parents[1] / "recipes" / f"{name}.yaml")
    for name in ("tiny-llama-pretrain-zero3-2xcpu", "llama-3.1-8b-sft-zero2-8xh100")
)
MODEL = ("llama-3.2-1b", "--gpus", "8xH100")
COMMANDS = {
    "plan": [("plan", *MODEL), ("plan", RECIPE)],
    "plan --clusters": [("plan", MODEL[0], "--clusters", "8xH100,1xT4", "--price", "8xH100=9")],
    "explain": [("explain", *MODEL, "layout.tp=2", "--what-if", "cluster=2xH200", "--what-if", "layout.tp=3")],
    "memory": [("memory", *MODEL), ("memory", LARGER, "cluster=1xRTX-4090")],
    "memory --largest": [("memory", "--largest", "--gpus", "1xRTX-4090")],
    "recipes list": [("recipes", "list")],
    "emit": [("emit", RECIPE, "--out", "run")],
    "convert": [("convert", "data", "corpus.txt", "--tokenizer", str(prepare().model), "--out", "train")],
    "convert inspect": [("convert", "inspect", str(prepare().model))],
    "generate": [("generate", str(prepare().model), "--prompt", "import os", "--max-new-tokens", "2")],
    "lint": [("lint", "ds_config.json")],
    "plan FILE": [("plan", "axolotl.yaml", "--gpus", "1xRTX-4090")],
    "doctor": [("doctor",)],
    "doctor LOGS": [("doctor", "train.log")],
}
"""Answer → commands that give one."""


@pytest.mark.everyday("plan", "plan FILE", "memory")
@pytest.mark.parametrize("command", all_answers())
def test_an_answer_is_as_its_schema_says(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files_in(tmp_path, {
        "ds_config.json": '{"train_batch_sise": 8}',
        "axolotl.yaml": "base_model: llama-3.2-1b\nadapter: lora\nlora_r: 8\nlora_alpha: 8\n",
        "corpus.txt": "a few words\n",
        "train.log": "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    })  # fmt: skip
    schema: dict[str, Any] = json_schema() | {"$ref": f"#/commands/{command.replace(' ', '%20')}"}
    for words in COMMANDS[command]:
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code in (0, 1), done.output
        answer = json.loads(done.stdout)
        jsonschema.validate(answer, schema)
        for key in (first := answer[0] if isinstance(answer, list) else answer):
            was, first[key] = first[key], 0.5 if isinstance(first[key], str | list | dict) else {"of": "another type"}
            refusal(jsonschema.ValidationError, jsonschema.validate, answer, schema)
            first[key] = was

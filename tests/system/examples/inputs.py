"""A tiny model, its tokenizer and a text, for the scripts in examples/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit.api import plan as make_plan
from kit.planner.plan import Plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec, OptimizerSpec
from kit.specs.layout import Pins
from tests.support import ROOT
from tests.support.assets import byte_tokenizer, once
from tests.support.files import files_in

DIRECTORY = ROOT / "build" / "examples"
BLOCK = 32
MICRO_BATCH, GLOBAL_BATCH, STEPS = 2, 8, 4
LEARNING_RATE = 1e-3
EPS = 1e-4
"""Adam's epsilon: with 1e-8 its first steps are the sign of the gradient, and rounding decides where that is small."""
ROWS = 24
"""Rows of each file of the TRL scripts."""


def prepare(directory: Path = DIRECTORY) -> Path:
    """``model/`` with a byte tokenizer and its chat template, ``reward/`` with a score in place of its head,
    ``text.txt``, and rows for each of TRL's trainers; made once, whoever of several processes asks first."""
    if not directory.exists():
        once(directory, _make)
    return directory


def _make(directory: Path) -> None:
    for name in ("model", "reward"):
        (directory / name).mkdir(parents=True)
        _write_tokenizer(directory / name)
        _write_model(directory / name)
    (directory / "text.txt").write_text(Path(json.__file__).read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    rows: dict[str, list[dict[str, Any]]] = {"chats": [], "preferences": [], "answers": [], "prompts": []}
    for k in range(ROWS):
        prompt = [{"role": "user", "content": f"What is {k} and {k}?"}]
        good, bad = ([{"role": "assistant", "content": text}] for text in (f"{2 * k}." + "." * (k % 5), "Who knows?"))
        rows["chats"].append({"messages": prompt + good})
        rows["preferences"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        rows["answers"].append({"prompt": prompt, "completion": bad if k % 3 == 0 else good, "label": k % 3 != 0})
        rows["prompts"].append({"prompt": prompt})
    files_in(directory, {f"{k}.jsonl": "".join(json.dumps(row) + "\n" for row in rows[k]) for k in rows})


def plan_for(model: Path, pins: Pins, weight_decay: float = 0.1, micro_batch: int = MICRO_BATCH, **job: Any) -> Plan:
    """A tiny model under some layout, eight sequences a step; ``job`` has other fields of ``JobSpec``."""
    common = {"seq_length": BLOCK, "global_batch_size": GLOBAL_BATCH, "total_tokens": 100_000, "precision": "fp32"}
    optimizer = OptimizerSpec(eps=EPS, weight_decay=weight_decay)
    spec = JobSpec(learning_rate=LEARNING_RATE, optimizer=optimizer, **common | job)
    return make_plan(load_model(str(model)), parse_cluster("2xcpu"), spec, pins.but(micro_batch_size=micro_batch))


def _write_tokenizer(directory: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    byte_tokenizer(directory, "<pad>", "</s>", eos_token="</s>", pad_token="<pad>", chat_template=template)


def _write_model(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        num_labels=1,
    )  # fmt: skip
    kind = LlamaForSequenceClassification if directory.name == "reward" else LlamaForCausalLM
    kind(config).save_pretrained(directory)

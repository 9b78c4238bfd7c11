"""Raw rows of a recipe: what they are for, tokenised once, in the same way from every kind of file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.cli.new_recipe import new_recipe, with_batch_for
from kit.errors import DataError, SpecError
from kit.specs.job import JobSpec
from kit.specs.recipe import load_recipe
from kit.specs.run import DataSpec, RunSpec
from kit.training.data.indexed import IndexedTokens
from kit.training.data.prepared import is_raw, objective_of, prepared, samples_of
from kit.training.data.row_parts import chat_of
from tests.support.assets import prepare
from tests.support.refusals import refusal

CHATS = [
    {"messages": [{"role": "user", "content": f"def f{n}"}, {"role": "assistant", "content": "return " * (n + 1)}]}
    for n in range(6)
]
SFT = JobSpec(objective="sft", seq_length=64)


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_of(path: str, template: str | None = "plain") -> RunSpec:
    return RunSpec(model_path=str(prepare().model), data=DataSpec(train=path, chat_template=template))


@pytest.mark.parametrize(
    ("row", "objective"),
    [
        (CHATS[0], "sft"),
        ({"conversations": []}, "sft"),
        ({"instruction": "a", "input": "", "output": "b"}, "sft"),
        ({"prompt": "a", "completion": "b", "id": 1}, "sft"),
        ({"source": "a", "target": "b"}, "seq2seq"),
        ({"text": "a", "url": "b"}, "pretrain"),
    ],
)
def test_the_first_row_says_what_rows_are_for(tmp_path, row, objective):
    assert objective_of(written(tmp_path / "rows.jsonl", [row])) == objective


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        ({"conversations": [{"role": "user", "content": "q"}]}, [("user", "q")]),
        ({"instruction": "do", "input": "it", "output": "a"}, [("user", "do\n\nit"), ("assistant", "a")]),
        ({"instruction": "do", "input": "", "output": "a"}, [("user", "do"), ("assistant", "a")]),
        ({"messages": [{"role": "user", "content": "q"}], "conversations": []}, [("user", "q")]),
    ],
)
def test_sharegpt_and_alpaca_are_chats(row, chat):
    assert [(turn["role"], turn["content"]) for turn in chat_of(row)] == chat


def test_other_rows_are_no_chats():
    assert [chat_of(row) for row in ({"prompt": "a"}, {"conversations": "a"}, {"instruction": "a", "output": 1})] == [
        None
    ] * 3


def test_text_is_for_pretraining_and_other_rows_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    assert objective_of(str(tmp_path / "a.txt")) == "pretrain"
    preferences = written(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert "trl-dpo" in refusal(DataError, objective_of, preferences)
    other = written(tmp_path / "o.jsonl", [{"question": "a"}])
    assert "fields question; give {messages} or" in refusal(DataError, objective_of, other)
    assert "of nothing" in refusal(DataError, objective_of, written(tmp_path / "e.jsonl", []))


def test_a_pair_is_no_raw_rows(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "pair.jsonl.idx").write_bytes(b"")
    for name, raw in {
        "a.jsonl": True, "a.parquet": True, "a.md": True, "set": True, "pair": False, "pair.jsonl": False,
        "absent": False,
    }.items():  # fmt: skip
        assert is_raw(str(tmp_path / name)) is raw, name
    assert is_raw("s3://bucket/a.jsonl")
    assert not is_raw("s3://bucket/a")


def test_rows_are_the_same_from_every_kind_of_file(tmp_path):
    import datasets
    import pyarrow.parquet

    lines = written(tmp_path / "rows.jsonl", CHATS)
    table = datasets.Dataset.from_list(CHATS)
    table.save_to_disk(tmp_path / "saved")
    pyarrow.parquet.write_table(table.data.table, tmp_path / "rows.parquet")
    found = []
    for path in (lines, str(tmp_path / "rows.parquet"), str(tmp_path / "saved")):
        assert objective_of(path) == "sft"
        pair = prepared(run_of(path), SFT, tmp_path, lambda _: None).data.train
        found.append(Path(f"{pair}.bin").read_bytes())
        assert samples_of(DataSpec(train=pair), SFT) == len(CHATS)
    assert found[0] == found[1] == found[2] != b""


def test_rows_are_tokenised_once_and_again_when_something_changes(tmp_path):
    said: list[str] = []
    path = written(tmp_path / "rows.jsonl", CHATS)
    model = shutil.copytree(prepare().model, tmp_path / "model")

    def pair(job: JobSpec = SFT, template: str | None = "plain") -> str:
        asked = replace(run_of(path, template), model_path=str(model))
        return str(prepared(asked, job, tmp_path, said.append).data.train)

    first = pair()
    assert pair() == first
    assert ["tokenised before" in line for line in said] == [False, True]
    longer, texts = pair(replace(SFT, seq_length=65)), pair(JobSpec(objective="sft", seq_length=64, learning_rate=1.0))
    assert longer != first == texts  # the length cuts rows; the rate does not
    jinja = tmp_path / "own.jinja"
    jinja.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert pair(template=str(jinja)) != first
    written(tmp_path / "rows.jsonl", CHATS[1:])
    assert IndexedTokens(pair()).sidecar.num_documents == len(CHATS) - 1  # the file's content counts
    written(tmp_path / "rows.jsonl", CHATS)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "own": 1}))
    assert pair() not in (first, longer)


def test_a_pair_stays_as_it_is_and_rows_need_a_tokenizer(tmp_path):
    run = RunSpec(data=DataSpec(train=str(tmp_path / "pair")))
    assert prepared(run, SFT, tmp_path, print) is run
    raw = RunSpec(data=DataSpec(train=written(tmp_path / "rows.jsonl", CHATS)))
    assert "run.model_path is missing" in refusal(SpecError, prepared, raw, SFT, tmp_path, print)


def test_text_has_as_many_samples_as_sequences(tmp_path):
    rows = written(tmp_path / "text.jsonl", [{"text": "import os\n" * 100}])
    job = JobSpec(seq_length=32)
    pair = prepared(run_of(rows, None), job, tmp_path, lambda _: None).data
    tokens = IndexedTokens(str(pair.train)).sidecar.num_tokens
    assert samples_of(pair, job) == tokens // 32 > 1


@pytest.mark.parametrize(
    ("samples", "gpus", "batch"),
    [(200, 2, 8), (200, 16, 16), (1000, 2, 32), (3199, 2, 64), (3200, 2, 128), (10**6, 2, 128), (1, 1, 1)],
)
def test_few_rows_have_a_smaller_batch(tmp_path, samples, gpus, batch):
    rows = written(tmp_path / "rows.jsonl", CHATS)
    made = new_recipe(str(prepare().model), f"{gpus}xH100", rows, {}, [])
    assert with_batch_for(made, samples).recipe.job.global_batch_size == batch
    given = new_recipe(str(prepare().model), f"{gpus}xH100", rows, {"global_batch_size": 64}, [])
    assert with_batch_for(given, samples).recipe.job.global_batch_size == 64


def test_the_new_recipe_reads_back_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = written(tmp_path / "rows.jsonl", CHATS)
    words = ["layout.engine=torch", "run.checkpoint.every_steps=7", "job.grad_clip=2", "run.data.validation=held"]
    made = new_recipe(str(prepare().model), "8xH100", "rows.jsonl", {"lora": {"rank": 4}}, words, "own.jinja")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/recipe.yaml").write_text(made.text(Path("runs/a")))
    again = load_recipe(tmp_path / "runs/a/recipe.yaml")
    assert replace(again, name=made.recipe.name) == made.recipe
    assert (again.job.lora.rank, again.job.learning_rate, again.job.epochs, again.run.checkpoint.every_steps) == (
        4, 2e-4, 3, 7,
    )  # fmt: skip
    assert again.run.data == DataSpec(
        train=rows, validation=str(tmp_path / "held"), chat_template=str(tmp_path / "own.jinja")
    )
    assert "no weights to start from" in refusal(SpecError, new_recipe, "13B", "8xH100", rows, {}, [])
    assert new_recipe("qwen3-8b", "8xH100", rows, {}, []).recipe.run.model_path.endswith("Qwen/Qwen3-8B")

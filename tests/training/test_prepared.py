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
from kit.training.data.segments import chat_of
from tests.support.assets import prepare
from tests.support.files import file_with, files_in
from tests.support.hostile import spoil
from tests.support.refusals import refusal

CHATS = [
    {"messages": [{"role": "user", "content": f"def f{n}"}, {"role": "assistant", "content": "return " * (n + 1)}]}
    for n in range(6)
]
SFT = JobSpec(objective="sft", seq_length=64)


def written(path: Path, rows: list[Any]) -> str:
    return str(file_with(path, "".join(json.dumps(row) + "\n" for row in rows)))


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
        ({"conversations": [{"from": "observation", "value": "3"}]}, [("tool", "3")]),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
         [("user", "q"), ("assistant", "a")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]}]},
         [("user", "qr")]),
        ({"instruction": "do", "input": "it", "output": "a"}, [("user", "do\n\nit"), ("assistant", "a")]),
        ({"instruction": "do", "input": "", "output": "a"}, [("user", "do"), ("assistant", "a")]),
        ({"messages": [{"role": "user", "content": "q"}], "conversations": []}, [("user", "q")]),
    ],
)  # fmt: skip
def test_spellings_of_peers_are_chats(row, chat):
    assert [(turn["role"], turn["content"]) for turn in chat_of(row, "x:1").messages] == chat


def test_calls_of_tools_are_kept_and_keys_of_nothing_are_not():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    row = {
        "messages": [
            {"role": "user", "content": "q", "tool_calls": None, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": '[{"name": "f"}]',
    }
    found = chat_of(row, "x:1")
    assert found.messages == [
        {"role": "user", "content": "q", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert (found.tools, found.asked) == ([{"name": "f"}], 0)
    assert chat_of({"prompt": CHATS[0]["messages"], "completion": [], "tools": ""}, "x:1")[1:] == ("", 2)


def test_other_rows_are_no_chats():
    rows = (
        {"prompt": "a"},
        {"conversations": "a"},
        {"instruction": "a", "output": 1},
        {"prompt": [], "completion": ""},
    )
    assert [chat_of(row, "x:1") for row in rows] == [None] * 4
    said = refusal(DataError, chat_of, {"conversations": [{"from": "alice", "value": "q"}]}, "x:1")
    assert said.startswith("x:1: from='alice' is none of ShareGPT's human, user, gpt")


def test_text_is_for_pretraining(tmp_path):
    assert objective_of(str(file_with(tmp_path / "a.txt", "words"))) == "pretrain"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "trl-dpo"),
        ([{"question": "a"}], "fields question; rename question to prompt; kit reads {messages} or"),
        ([{"prompt": "a", "completion": "b", "label": False}], "has preferences (prompt, completion, label)"),
        ([], "has no rows"),
        ([[1]], "rows.jsonl:1 holds a list"),
        ([{}], "fields of nothing; give"),
    ],
)
def test_other_rows_are_refused(tmp_path, rows, says):
    assert says in refusal(DataError, objective_of, written(tmp_path / "rows.jsonl", rows))


def test_a_pair_is_no_raw_rows(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "pair.jsonl.idx").write_bytes(b"")
    names = ("a.jsonl", "a.parquet", "a.md", "set", "pair", "pair.jsonl", "absent")
    assert [name for name in names if is_raw(str(tmp_path / name))] == ["a.jsonl", "a.parquet", "a.md", "set"]
    assert is_raw("s3://bucket/a.jsonl")
    assert not is_raw("s3://bucket/a")


def test_rows_are_the_same_from_every_kind_of_file(tmp_path):
    import datasets
    import pyarrow.parquet

    lines = written(tmp_path / "rows.jsonl", CHATS)
    table = datasets.Dataset.from_list(CHATS)
    table.save_to_disk(tmp_path / "saved")
    beside = dict.fromkeys(("shards/README.md", "saved/more/README.md"), "no rows")
    files_in(tmp_path, {"list.json": json.dumps(CHATS, indent=1), **beside})
    shutil.copy(lines, tmp_path / "lines.json")
    written(tmp_path / "shards" / "b.jsonl", CHATS[2:])
    written(tmp_path / "shards" / "a.jsonl", CHATS[:2])
    pyarrow.parquet.write_table(table.data.table, tmp_path / "rows.parquet")
    found = []
    others = (str(tmp_path / name) for name in ("rows.parquet", "saved", "list.json", "lines.json", "shards"))
    for path in (lines, *others):
        assert objective_of(path) == "sft"
        pair = prepared(run_of(path), SFT, tmp_path, lambda _: None).data.train
        found.append(Path(f"{pair}.bin").read_bytes())
        assert samples_of(DataSpec(train=pair), SFT) == len(CHATS)
    assert {*found} == {found[0]} != {b""}
    assert "half.json is not a JSON list of rows" in refusal(
        DataError, objective_of, str(file_with(tmp_path / "half.json", '[{"text": "a"}, {"te'))
    )


def test_rows_are_tokenised_once_and_again_when_something_changes(tmp_path):
    said: list[str] = []
    path = written(tmp_path / "rows.jsonl", CHATS)
    model = shutil.copytree(prepare().model, tmp_path / "model")

    def pair(job: JobSpec = SFT, template: str | None = "plain") -> str:
        asked = replace(run_of(path, template), model_path=str(model))
        return str(prepared(asked, job, tmp_path, said.append).data.train)

    first = pair()
    assert (pair(), ["tokenised before" in line for line in said]) == (first, [False, True])
    longer, texts = pair(replace(SFT, seq_length=65)), pair(JobSpec(objective="sft", seq_length=64, learning_rate=1.0))
    assert longer != first == texts  # the length cuts rows; the rate does not
    jinja = file_with(tmp_path / "own.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert pair(template=str(jinja)) != first
    written(tmp_path / "rows.jsonl", CHATS[1:])
    assert IndexedTokens(pair()).sidecar.num_documents == len(CHATS) - 1  # the file's content counts
    written(tmp_path / "rows.jsonl", CHATS)
    spoil(model / "tokenizer_config.json", ("own",), 1)
    assert pair() not in (first, longer)


def test_a_pair_stays_as_it_is_and_rows_need_a_tokenizer(tmp_path):
    run = RunSpec(data=DataSpec(train=str(tmp_path / "pair")))
    assert prepared(run, SFT, tmp_path, print) is run
    raw = RunSpec(data=DataSpec(train=written(tmp_path / "rows.jsonl", CHATS)))
    assert "run.model_path is missing" in refusal(SpecError, prepared, raw, SFT, tmp_path, print)
    run = run_of(written(tmp_path / "rows.jsonl", CHATS))
    said = refusal(SpecError, prepared, run, JobSpec(objective="dpo", seq_length=64), tmp_path, print)
    assert said.startswith("objective=dpo: TRL's trainer trains it")
    shutil.copy(prepare().model / "config.json", tmp_path)
    empty = replace(run, model_path=str(tmp_path))
    assert f"{tmp_path} holds no tokenizer" in refusal(DataError, prepared, empty, SFT, tmp_path, print)


def test_text_has_as_many_samples_as_sequences(tmp_path):
    rows = written(tmp_path / "text.jsonl", [{"text": "import os\n" * 100}])
    job = JobSpec(seq_length=32)
    pair = prepared(run_of(rows, None), job, tmp_path, lambda _: None).data
    assert samples_of(pair, job) == IndexedTokens(str(pair.train)).sidecar.num_tokens // 32 > 1


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
    again = load_recipe(file_with(tmp_path / "runs/a/recipe.yaml", made.text(Path("runs/a"))))
    assert replace(again, name=made.recipe.name) == made.recipe
    assert (again.job.lora.rank, again.job.learning_rate, again.job.epochs, again.run.checkpoint.every_steps) == (
        4, 2e-4, 3, 7,
    )  # fmt: skip
    assert again.run.data == DataSpec(
        train=rows, validation=str(tmp_path / "held"), chat_template=str(tmp_path / "own.jinja")
    )
    assert "no weights to start from" in refusal(SpecError, new_recipe, "13B", "8xH100", rows, {}, [])
    named = new_recipe("qwen3-8b", "8xH100", rows, {}, ["run.steps=5"])
    assert named.recipe.run.model_path.endswith("Qwen/Qwen3-8B")
    assert "null" not in named.text(tmp_path), "a number of steps stands for one of epochs"

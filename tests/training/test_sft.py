"""Rows of unequal length: written, read, padded, bucketed, packed; the same gradient on every layout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kit.engines.huggingface.models import random_model
from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from kit.errors import DataError
from kit.specs.job import LoraSpec
from kit.specs.run import BlendedSetSpec, DataSpec
from kit.training.__main__ import _warn_of_random_weights, _where_to_resume
from kit.training.checkpoint.convert import convert
from kit.training.data import segments
from kit.training.data.chat_template import chat_template_of, read_chat_template
from kit.training.data.fine_tuning_rows import Row, Rows
from kit.training.data.indexed import IndexedTokens
from kit.training.data.loader import DataLoader, DataParallelShard, training_batches, validation_batches
from kit.training.data.samples import MULTIPLE, RowSamples, packed, packs, padded
from kit.training.data.tokenise import Tokenised, tokenise
from tests.support import tiny
from tests.support.assets import byte_tokenizer
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import cases, runs
from tests.training.pairs import pair
from tests.training.sft_rows import JOB, gradients_of_a_step, rows_alone, rows_on_disk

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One id a byte, and the special tokens of ChatML; a config.json beside it."""
    of_chats = ["<|im_start|>", "<|im_end|>"]
    place = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(place, "</s>", *of_chats, eos_token="</s>", additional_special_tokens=of_chats)
    config = {"model_type": "bart", "vocab_size": 259, "decoder_start_token_id": 0}
    return file_with(place / "config.json", json.dumps(config)).parent


def templated(tokenizer: Path, directory: Path, template: str) -> Path:
    """Copies the tokenizer and adds a chat template."""
    PreTrainedTokenizerFast.from_pretrained(tokenizer, chat_template=template).save_pretrained(directory)
    return directory


def tokenised(path: Path, tokenizer: Path, *rows: Any, objective: Any = "sft", **options: Any) -> Tokenised:
    """Writes the rows to x.jsonl in the directory, and the pair ``out`` of them beside it."""
    (path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tokenise([path / "x.jsonl"], tokenizer, path / "out", objective=objective, **options)


def read(prefix: Path, tokenizer: Path, seq_length: int = 200) -> list[tuple[str, str]]:
    """(all that a row says, the part of it that counts) of each row."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    rows = Rows(IndexedTokens(prefix), "sft", seq_length, 1000)
    texts = []
    for row in rows.read_all(range(len(rows))):
        whole = [*row.inputs[:1], *np.where(row.labels == IGNORE_INDEX, [*row.inputs[1:], -1], row.labels)]
        counted = row.labels[row.labels != IGNORE_INDEX]
        texts.append((loaded.decode([t for t in whole if t >= 0]), loaded.decode(counted)))
    return texts


def chat(*turns: str) -> dict[str, Any]:
    """Turns of user and assistant by turns."""
    return {"messages": [{"role": ("user", "assistant")[k % 2], "content": turn} for k, turn in enumerate(turns)]}


TALK = chat("Hi", "Hello!", "And?", "No.")
PLAIN = "### user:\nHi\n\n### assistant:\nHello!</s>\n\n### user:\nAnd?\n\n### assistant:\nNo.</s>"
AS_CHATML = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
)


TOOLS = "{% for t in tools or [] %}{{ t.name }};{% endfor %}{% for m in messages %}{{ m.content }} {% endfor %}"


# Conversion


@pytest.mark.parametrize(
    ("own", "asked", "row", "whole", "counted", "recorded"),
    [
        # The last newline is a token that nothing follows, but a label all the same.
        (CHATML, None, TALK, AS_CHATML, "Hello!<|im_end|>\nNo.<|im_end|>\n", CHATML),
        (None, "my.jinja", TALK, AS_CHATML, "Hello!<|im_end|>\nNo.<|im_end|>\n", CHATML),
        (None, "plain", TALK, PLAIN, "Hello!</s>No.</s>", read_chat_template("plain")),
        (CHATML, "plain", TALK, PLAIN, "Hello!</s>No.</s>", read_chat_template("plain")),
        (None, None, {"prompt": "2+2=", "completion": "4"}, "2+2=4</s>", "4</s>", None),
        (None, "plain", {"prompt": TALK["messages"][:3], "completion": TALK["messages"][3:]}, PLAIN, "No.</s>",
         read_chat_template("plain")),
        (TOOLS, None, TALK | {"tools": [{"name": "f"}]}, "f;Hi Hello! And? No. ", "Hello! No. ", TOOLS),
    ],
    ids=["own", "of a file", "of kit", "of kit instead of its own", "none", "of TRL's messages", "of tools"],
)  # fmt: skip
def test_what_the_assistant_says_counts(tokenizer, tmp_path, monkeypatch, own, asked, row, whole, counted, recorded):
    """By the tokenizer's template, or one that is asked for: of a file, or of kit. It is recorded."""
    directory = tokenizer if own is None else templated(tokenizer, tmp_path / "t", own)
    monkeypatch.chdir(tmp_path)
    Path("my.jinja").write_text(CHATML)
    done = tokenised(tmp_path, directory, row, chat("a", "b") if "messages" in row else row, chat_template=asked)
    assert "2 rows for sft" in str(done)
    assert read(tmp_path / "out", directory)[0] == (whole, counted)
    assert done.sidecar.chat_template == recorded


@pytest.mark.parametrize(
    ("own", "asked", "row", "says"),
    [
        (None, None, TALK, r"x\.jsonl:1 holds messages and the tokenizer has no chat template; give .* plain"),
        (None, "chatml", TALK, r"--chat-template chatml is no file of text; give .* or plain"),
        (
            "{% for m in messages %}{{ m.content if loop.last else '…' }}{% endfor %}", None, TALK,
            r"x\.jsonl:1: the chat template writes a turn differently",
        ),
        ("{{ raise_exception('no') }}", None, TALK, r"x\.jsonl:1: the chat template refuses these messages \(no"),
        (None, None, {"text": "a"}, r"fields text; for objective=sft give \{messages\} or \{prompt, completion\}"),
        (None, None, ["a"], r"x\.jsonl:1 holds a list; one JSON object a line is needed"),
        (CHATML, None, {"messages": [{"role": "user", "content": "a"}]}, "no message to learn, with role="),
        (CHATML, None, {"messages": [{"role": "assistant"}]}, r"message 1 \(role=assistant\) has no text in"),
        (CHATML, None, {"messages": "a"}, "should be a list"),
        (CHATML, None, {"conversations": [{"from": ["x" * 9999], "value": "a"}]}, "is none of ShareGPT's human"),
    ],
    ids=[
        "no template", "no file", "rewrites", "raises", "fields", "list", "no answer", "no content", "no list",
        "unknown role",
    ],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(tokenizer, tmp_path, own, asked, row, says):
    directory = tokenizer if own is None else templated(tokenizer, tmp_path / "t", own)
    assert re.search(says, refusal(DataError, tokenised, tmp_path, directory, row, chat_template=asked))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("adds", [False, True])
def test_a_prompt_begins_as_the_tokenizer_begins_a_text(tokenizer, tmp_path, adds):
    """With a BOS where it adds one, and without where it only has one. A chat begins as its template begins it."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer, bos_token="<|im_start|>")
    if adds:
        loaded.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", loaded.bos_token_id)]
        )
    loaded.save_pretrained(tmp_path / "t")
    tokenised(tmp_path, tmp_path / "t", {"prompt": "2+2=", "completion": "4"}, TALK, chat_template="plain")
    assert read(tmp_path / "out", tmp_path / "t") == [
        ("<|im_start|>" * adds + "2+2=4</s>", "4</s>"),
        (PLAIN, "Hello!</s>No.</s>"),
    ]


def test_long_rows_lose_their_end_and_empty_ones_are_left_out(tokenizer, tmp_path):
    rows = [{"prompt": "abcd", "completion": "efgh"}, {"prompt": "abcdefghij", "completion": "k"}]
    result = tokenised(tmp_path, tokenizer, *rows, seq_length=6)
    assert (result.cut, result.dropped, result.sidecar.longest) == (2, 1, 7)
    assert read(tmp_path / "out", tokenizer, seq_length=6) == [("abcdefg", "efg")]
    assert "has a row of 6 tokens and job.seq_length is 5" in refusal(DataError, read, tmp_path / "out", tokenizer, 5)


def test_a_slow_tokenizer_is_refused(tokenizer):
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer, chat_template=CHATML)
    slow = SimpleNamespace(is_fast=False, chat_template="x", apply_chat_template=loaded.apply_chat_template)
    said = refusal(DataError, segments.chat_segments, slow, TALK["messages"], "x.jsonl:1")
    assert "gives no offsets (it is a slow one)" in said


def test_a_decoder_begins_with_a_token_that_its_model_names(tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "t")
    (tmp_path / "t" / "config.json").write_text('{"model_type": "bart"}')
    assert "config.json has no decoder_start_token_id" in refusal(
        DataError, tokenised, tmp_path, tmp_path / "t", {"source": "ab", "target": "cde"}, objective="seq2seq"
    )


def test_pairs(tokenizer, tmp_path):
    """They are as long as the longer of the two."""
    pairs = {"source": "ab", "target": "cde"}, {"source": "abcdef", "target": "c"}
    result = tokenised(tmp_path, tokenizer, *pairs, objective="seq2seq")
    assert (result.sidecar.longest, result.sidecar.decoder_start_token_id) == (6, 0)
    samples = RowSamples(rows := Rows(IndexedTokens(tmp_path / "out"), "seq2seq", 6, 1000), 6)
    assert [samples.length(index) for index in range(2)] == [3, 6]
    (row,), loaded = rows.read_all([0]), PreTrainedTokenizerFast.from_pretrained(tokenizer)
    assert (loaded.decode(row.source), loaded.decode(row.labels)) == ("ab", "cde")
    assert row.inputs.tolist() == [0, *row.labels[:-1]]
    assert "has a row of 6 tokens and job.seq_length is 5" in refusal(
        DataError, Rows, IndexedTokens(tmp_path / "out"), "seq2seq", 5, 1000
    )


@pytest.mark.parametrize(
    ("parts", "objective", "length", "kept", "learns"),
    [
        ([[1, 2], [3, 4], [5], [6]], "sft", None, [[1, 2], [3, 4], [5], [6]], True),
        ([[1, 2], [3, 4], [5], [6]], "sft", 5, [[1, 2], [3, 4], [5], [6]], True),  # six tokens are five inputs
        ([[1, 2], [3, 4], [5], [6]], "sft", 2, [[1, 2], [3]], True),
        ([[1, 2], [3, 4], [5], [6]], "sft", 1, [[1, 2]], False),
        ([[1, 2], [], [5], [6]], "sft", 9, [[1, 2], [], [5], [6]], True),  # what comes after keeps its place
        ([[], [3, 4]], "sft", 9, [[], [3, 4]], True),
        ([[], [3]], "sft", 9, [[], [3]], False),  # no token is before it
        ([[1], [3]], "sft", 9, [[1], [3]], True),
        ([[1, 2, 3], [4, 5, 6]], "seq2seq", 2, [[1, 2], [4, 5]], True),
        ([[], [4, 5]], "seq2seq", 2, [[], [4, 5]], False),
    ],
)
def test_rows_are_cut_at_their_end(parts, objective, length, kept, learns):
    assert segments.shortened(parts, objective, length) == kept
    assert segments.learns(kept, objective) == learns


def row(first, size, source=None):
    """Inputs first, first + 1, …, and labels that are ten times as large."""
    ids = np.arange(first, first + size)
    return Row(inputs=ids, labels=10 * ids, source=None if source is None else np.arange(source))


def filled(batch: MicroBatch) -> dict[str, Any]:
    """All that it has, as numbers and lists."""
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in vars(batch).items()
        if value is not None
    }


def test_rows_of_a_pack_begin_at_position_0_and_padding_is_a_document_of_its_own():
    assert filled(packed([[row(1, 3), row(5, 2)], [row(9, 4)]], 16)) == {
        "input_ids": [[1, 2, 3, 5, 6, 0, 0, 0], [9, 10, 11, 12, 0, 0, 0, 0]],
        "labels": [[10, 20, 30, 50, 60] + [IGNORE_INDEX] * 3, [90, 100, 110, 120] + [IGNORE_INDEX] * 4],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]],
        "sequence_ids": [[0, 0, 0, 1, 1, -1, -1, -1], [0, 0, 0, 0, -1, -1, -1, -1]],
        "padding": 3 + 4,
        "squared_lengths": 9 + 4 + 16,
    }
    assert packed([[row(1, 3)]], 16, multiple=16).input_ids.shape == (1, 16)
    assert MicroBatch(torch.zeros(2, 16), torch.zeros(2, 16)).attended == 2 * 16 * 16, "text: all of a row"


def test_pairs_are_padded_on_both_sides():
    assert filled(padded([row(1, 3, source=2), row(5, 2, source=9)], 16)) == {
        "input_ids": [[1, 2, 3, 0, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]],
        "labels": [[10, 20, 30] + [IGNORE_INDEX] * 5, [50, 60] + [IGNORE_INDEX] * 6],
        "source_ids": [[0, 1] + [0] * 14, [*range(9)] + [0] * 7],
        "source_mask": [[1, 1] + [0] * 14, [1] * 9 + [0] * 7],
        "padding": 5 + 6 + 14 + 7,
        "squared_lengths": 9 + 4 + 4 + 81,
    }


@pytest.mark.parametrize(("seq_length", "length"), [(12, 12), (20, 16)])
def test_rows_are_rounded_up_and_never_beyond_seq_length(seq_length, length):
    """Rows of 3 and 11 tokens."""
    rows = [Row(inputs=np.arange(n), labels=np.arange(n), source=np.arange(n)) for n in (3, 11)]
    plain = padded(rows, seq_length)
    assert plain.input_ids.shape == plain.labels.shape == plain.source_ids.shape == (2, length)
    assert packed([rows[:1], rows[1:]], seq_length).input_ids.shape == (2, length)


def test_a_blend_has_a_template_if_all_its_sets_have_one(tmp_path):
    for name, template in (("a", CHATML), ("b", CHATML), ("c", "other"), ("d", None)):
        pair(tmp_path / name, [[[1], [2]]], "sft", chat_template=template)
    for names, found in (("a", CHATML), ("ab", CHATML), ("abc", None), ("ad", None), ("d", None)):
        blend = {name: BlendedSetSpec(path=str(tmp_path / name), weight=1) for name in names}
        assert chat_template_of(DataSpec(blend=blend)) == found


@pytest.mark.parametrize("capacity", [10, 37, 64])
def test_packs_hold_every_row_once_and_leave_little_room(capacity):
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 500).tolist()
    found = packs(lengths, capacity)
    assert sorted(row for pack in found for row in pack) == list(range(500))
    assert len(found) <= 11 / 9 * (sum(lengths) / capacity) + 4 or capacity < 20
    # No two packs fit into one: best fit would have put them together.
    sizes = sorted(sum(lengths[row] for row in pack) for pack in found)
    assert sizes[-1] <= capacity < sizes[0] + sizes[1]


def test_bucketing_changes_who_computes_a_row_and_not_which_are_computed(tmp_path):
    samples = RowSamples(Rows(IndexedTokens(rows_on_disk(tmp_path / "x")), "sft", 32, 128), 32)

    def tokens(bucketed: bool) -> tuple[list[Any], int]:
        batches = [
            batch
            for rank in range(2)
            for batch in training_batches(samples, 5, 16, DataParallelShard(2, 4, rank, 2), bucketed)
        ]
        rows = sorted(row[row != IGNORE_INDEX].tolist() for batch in batches for row in batch.labels)
        if bucketed:  # a micro batch after the other, both ranks: the longest first
            rounds = [max(batch.input_ids.shape[1] for batch in batches[k::4]) for k in range(4)]
            assert rounds == sorted(rounds, reverse=True)
        return rows, sum(batch.input_ids.numel() for batch in batches)

    (plain, computed), (bucketed, computed_bucketed) = tokens(False), tokens(True)
    assert plain == bucketed
    assert computed_bucketed < computed


@pytest.mark.parametrize("packing", [False, True])
def test_validation_counts_every_row_once(tmp_path, packing):
    """Five samples on two ranks of two: three places are filled with what does not count."""
    samples = RowSamples(Rows(IndexedTokens(rows_on_disk(tmp_path / "x")), "sft", 32, 128), 32, packing=packing)
    ranks = [validation_batches(samples, 5, DataParallelShard(2, 1, rank, 2)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    expected, found = (
        sorted(row[row != IGNORE_INDEX].tolist() for batch in batches for row in batch.labels)
        for batches in (samples.micro_batches([[k] for k in range(5)]), [*ranks[0], *ranks[1]])
    )
    assert found == [[], [], [], *expected]


TORCH = [{"engine": "torch", "zero_stage": stage, "dp": 2} for stage in (0, 3)]
ZERO = [{"engine": "deepspeed", "zero_stage": stage, "dp": 2} for stage in (2, 3)]
MEGATRON = [
    {"engine": "megatron", "implementation": "local", **split}
    for split in ({"dp": 2, "zero_stage": 1}, {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "recompute": "full"})
]


@pytest.mark.everyday("llama-False-layouts0")
@pytest.mark.parametrize(
    ("family", "packing", "layouts"),
    [
        ("llama", False, [*TORCH, *ZERO, *MEGATRON]),
        ("llama", True, [*TORCH, *ZERO, *MEGATRON]),
        ("gpt2", True, TORCH[:1]),
        ("mistral", True, [*TORCH[:1], *MEGATRON[2:]]),
    ],
)
def test_unequal_rows_give_one_gradient_on_every_layout(tmp_path, family, packing, layouts):
    """Every step's mean is over all its tokens: neither padding, nor packing, nor who computes what may show."""
    spec = tiny.model(family, **({"sliding_window": 5} if family == "mistral" else {}))
    expected = rows_alone(tmp_path, spec, packing)
    for layout in layouts:
        found = pool(layout["engine"], 2).run(gradients_of_a_step, expected.run_directory(tmp_path / "run", layout))[0]
        assert (found["loss"].tokens, found["loss"].mean) == (
            expected.tokens,
            pytest.approx(expected.mean, rel=1e-6),
        )
        assert cases.worst(found["gradients"], expected.gradients) < 1e-5, layout


@pytest.mark.parametrize("layout", [{"dp": 2}, {"engine": "megatron", "implementation": "local", "tp": 2}], ids=str)
def test_tokens_and_padding_are_counted_over_all_ranks(tmp_path, layout):
    """Each position once, though the ranks of a tensor-parallel group read the same. Tokens seen and tokens per second
    are of all tokens of rows, contexts too; the loss is of the labels."""
    rows = Rows(IndexedTokens(rows_on_disk(tmp_path / "train")), "sft", tiny.SEQ_LENGTH, tiny.VOCAB_SIZE)
    plan = tiny.plan(job=JOB, micro_batch_size=2, gradient_accumulation_steps=2, **layout)
    data, dp, size = DataSpec(train=str(tmp_path / "train")), layout.get("dp", 1), plan.layout.global_batch_size
    rundir = tiny.run_directory(tmp_path / "run", plan, data=data, steps=2)
    summary = pool(plan.layout.engine, 2).run(runs.run, rundir)[1]
    samples, seen = (
        RowSamples(rows, tiny.SEQ_LENGTH, tiny.SEQ_LENGTH if plan.layout.engine == "megatron" else MULTIPLE),
        0,
    )
    for step, row in enumerate(runs.steps(rundir)):
        positions = sum(
            batch.input_ids.numel()
            for rank in range(dp)
            for batch in training_batches(samples, data.seed, step * size, DataParallelShard(2, 2, rank, dp), True)
        )
        real = sum(int(rows.lengths[samples.drawn(data.seed, step * size + k)]) for k in range(size))
        assert 0 < row["padding_fraction"] == pytest.approx(1 - real / positions)
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(real)
        assert 0 < row["tokens"] < real
        seen += real
    assert summary.tokens_seen == seen


@pytest.mark.parametrize(
    ("objective", "packing", "says"),
    [
        ("pretrain", True, "packing with objective=pretrain"),
        ("pretrain", False, "was written for objective=sft and the job has pretrain"),
        ("seq2seq", False, "was written for objective=sft and the job has seq2seq"),
    ],
)
def test_rows_are_of_an_objective_and_packing_of_rows_alone(tmp_path, objective, packing, says):
    data = DataSpec(train=str(rows_on_disk(tmp_path / "train")), packing=packing)
    rundir = tiny.run_directory(tmp_path, tiny.plan(job={"objective": objective}), data=data)
    assert says in refusal(DataError, DataLoader.open, rundir.plan, rundir.run, SimpleNamespace(dp_rank=0, dp_size=1))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_the_exported_model_has_the_template_that_it_was_trained_with(tokenizer, tmp_path, lora):
    """Not that of the directory whose tokenizer is copied; a whole model and adapters."""
    hf = templated(tokenizer, tmp_path / "hf", CHATML)
    model = tiny.model(vocab_size=264)
    random_model(model, 0).save_pretrained(hf)
    tokenised(tmp_path, hf, *[chat("a", "b")] * 8, vocab_size=264, chat_template="plain")
    plan = tiny.plan(model, job={"objective": "sft", "lora": lora})
    data, out = DataSpec(train=str(tmp_path / "out")), tmp_path / "converted"
    runs.run(tiny.run_directory(tmp_path / "run", plan, data=data, model_path=str(hf), steps=1))
    said = convert(tmp_path / "run" / "checkpoints" / "step-00000001", "hf", out, extras_from=hf)
    assert said.endswith("in bfloat16, chat_template.jinja is the one it was trained with")
    assert (out / ("model.safetensors" if lora is None else "adapter_model.safetensors")).is_file()
    if lora is not None:
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(hf)
    loaded = AutoTokenizer.from_pretrained(out)
    text = loaded.apply_chat_template(chat("Hi")["messages"], tokenize=False, add_generation_prompt=True)
    assert text == "### user:\nHi\n\n### assistant:\n"
    assert loaded("Hi").input_ids == AutoTokenizer.from_pretrained(hf)("Hi").input_ids


@pytest.mark.parametrize(
    ("objective", "resume", "saved", "said"),
    [
        ("sft", None, False, True),
        ("sft", "auto", False, True),  # there is no checkpoint yet
        ("sft", "auto", True, False),
        ("sft", None, True, True),
        ("sft", "step", False, False),
        ("pretrain", None, False, False),
    ],
)
def test_fine_tuning_of_random_weights_is_said_at_start(tmp_path, capsys, objective, resume, saved, said):
    plan = tiny.plan(job={"objective": objective})
    if saved:
        (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    for model_path, warned in ((None, said), (str(tmp_path), False)):
        _warn_of_random_weights(tiny.run_directory(tmp_path / "run", plan, model_path=model_path), resume)
        assert ("training starts from RANDOM weights" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("restarts", "saved", "asked", "resume"),
    [
        ("0", True, None, None),
        ("0", True, "step", "step"),
        ("1", True, "step", "auto"),
        ("1", False, "step", "step"),  # it has not come to a checkpoint of its own
        ("1", False, None, "auto"),
    ],
)
def test_restarted_by_torchrun_a_run_goes_on_from_its_own_checkpoint(
    tmp_path, monkeypatch, restarts, saved, asked, resume
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    if saved:
        (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert _where_to_resume(tiny.run_directory(tmp_path), asked) == resume

"""Text → tokens: every kind of source, and everything that is refused before a file is written."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kit.cli import app
from kit.errors import DataError
from kit.training.data import indexed_writer as writing
from kit.training.data import tokenize_rows
from kit.training.data.indexed import IndexedTokens, PairFormat
from kit.training.data.indexed_writer import indexed_writer
from kit.training.data.tokenise import tokenise
from kit.training.data.tokenize_rows import BATCH_DOCUMENTS
from kit.training.progress import progress_bar
from tests.support.calls import before, killing
from tests.support.files import file_with, files_in
from tests.support.refusals import refusal
from tests.training.disk import full_disk
from tests.training.pairs import pair


def save_tokenizer(directory: Path, words: str = "abcde") -> Path:
    ids = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>").save_pretrained(directory)
    return directory


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    rows = (json.dumps({"text": "a b c d e " * (k % 4) + "abcde"[k % 5]}) for k in range(first, first + count))
    return file_with(path, "\n".join(rows) + "\n")


def files(prefix: Path) -> dict[str, bytes]:
    """The contents of all files with this prefix, by suffix."""
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.*")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A word-level tokenizer of seven words, with a config.json beside it as in a model's directory."""
    directory = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    return directory


def tokens(prefix):
    stream = IndexedTokens(prefix)
    return stream.read(0, len(stream)).tolist()


def refused(says, sources, tokenizer, out, **options):
    """With this message, and before a file is written."""
    assert re.search(says, refusal(DataError, lambda: tokenise(sources, tokenizer, out, **options)))
    assert not list(out.parent.glob(f"{out.name}*"))


def test_every_kind_of_source(tokenizer, tmp_path):
    files_in(tmp_path, {"1.txt": "a b\nc\n", "2.jsonl": '{"body": "d", "n": 1}\n\n{"body": ""}\n{"body": "e e"}\n'})
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "body": ["a", "zzz"]}), tmp_path / "3.parquet")
    datasets.Dataset.from_dict({"body": ["c d"], "n": [0]}).save_to_disk(tmp_path / "4")
    sources = [tmp_path / name for name in ("1.txt", "2.jsonl", "3.parquet", "4")]
    result = tokenise(sources, tokenizer, tmp_path / "out" / "train", text_key="body")
    assert tokens(tmp_path / "out" / "train") == [2, 3, 4, 1, 5, 1, 6, 6, 1, 2, 1, 0, 1, 4, 5, 1]
    assert (result.sidecar.num_documents, result.sidecar.max_token_id, result.sidecar.vocab_size) == (6, 6, 7)
    assert str(result) == f"{tmp_path}/out/train: 16 tokens in 6 documents, largest id 6"


@pytest.mark.parametrize(("call", "last"), [("complete_file", ".idx"), ("write_text", ".json")])
def test_a_pair_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch, call, last):
    def full(path, *_):
        if path.suffix == last:
            raise OSError(28, "No space left on device")

    before(monkeypatch, writing, call, full)
    with (
        pytest.raises(DataError, match="No space left"),
        indexed_writer(tmp_path / "x", PairFormat(tokenizer="t", vocab_size=7)) as writer,
    ):
        writer.add_document([1, 2])
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_whoever_fills_a_pair_is_told_as_it_is(tmp_path):
    with (
        pytest.raises(OSError, match="No such file"),
        indexed_writer(tmp_path / "x", PairFormat(tokenizer="t", vocab_size=7)) as writer,
    ):
        writer.add_document(Path("missing").read_bytes())
    assert list(tmp_path.iterdir()) == []


def test_special_tokens_truncation_and_padding_of_the_tokenizers_file_do_not_count(tokenizer, tmp_path):
    """Llama's puts a BOS before every text: a document ends with one token, and begins with none."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    inner = loaded.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    inner.enable_truncation(3)
    inner.enable_padding(pad_id=0, pad_token="<unk>")
    loaded.save_pretrained(tmp_path / "adding")
    tokenise(
        [file_with(tmp_path / "x.jsonl", '{"text": "a b c d"}\n{"text": "e"}\n')], tmp_path / "adding", tmp_path / "x"
    )
    assert tokens(tmp_path / "x") == [2, 3, 4, 5, 1, 6, 1]


def test_more_documents_than_a_batch(tokenizer, tmp_path):
    rows = ["abcde"[i % 5] for i in range(2 * BATCH_DOCUMENTS + 1)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    tokenise([tmp_path / "x.jsonl"], tokenizer, tmp_path / "x")
    assert tokens(tmp_path / "x")[::2] == [2 + i % 5 for i in range(len(rows))]


@pytest.mark.parametrize(("config", "asked", "last"), [(8, 6, 5), (5, None, 4), (5, 7, None), (7, None, None)])
def test_a_tokenizer_larger_than_the_model(tokenizer, tmp_path, config, asked, last):
    """What is asked for counts more than the config.json beside it."""
    shutil.copytree(tokenizer, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": config}))
    said = f"has ids up to 6, and the model's vocabulary ends at {last}"
    with pytest.raises(DataError, match=said) if last else nullcontext():
        tokenise([file_with(tmp_path / "x.txt", "a")], tmp_path / "model", tmp_path / "x", vocab_size=asked)
    assert bool(list(tmp_path.glob("x.bin*"))) == (last is None)


@pytest.mark.parametrize(
    ("name", "content", "objective", "says"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "pretrain", r"bad\.jsonl:2 is not JSON Lines"),
        (
            "half.jsonl",
            b'{"text": "a"}\n\n{"text": "\\ud800"}\n',
            "pretrain",
            r"half\.jsonl:3 is not JSON Lines .*surrogates",
        ),
        ("no-field.jsonl", b'{"body": "a"}\n', "pretrain", r"no-field\.jsonl:1 has no text in field 'text'"),
        ("latin.txt", b"\xe4\xf6", "pretrain", "is not readable as UTF-8"),
        (
            "rows.txt",
            b'{"prompt": "a", "completion": "b"}',
            "sft",
            r"rows\.txt: rows for fine-tuning are read from \.jsonl, \.parquet",
        ),
        ("x.pdf", b"%PDF", "pretrain", r"unknown suffix '\.pdf'"),
        ("bad.parquet", b"PAR0", "pretrain", "is not readable as Parquet"),
        ("empty.txt", b"", "pretrain", "have no text"),
        ("directory", None, "pretrain", "is not a data set saved with save_to_disk"),
        ("absent/x.txt", None, "pretrain", "does not exist"),
    ],
)
def test_sources_that_cannot_be_read(tokenizer, tmp_path, name, content, objective, says):
    (tmp_path / "directory").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(says, [tmp_path / name], tokenizer, tmp_path / "out", objective=objective)


def test_tables_without_the_text(tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"body": ["a"]})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    files_in(tmp_path, {f"{name}/rows.jsonl": '{"text": "b"}\n' for name in ("saved", "splits")})  # not of the data set
    for name, table in (("x.parquet", {"body": ["a"]}), ("y.parquet", {"text": [1]})):
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / name)
    for name, says in (
        ("saved", r"saved has no column 'text'; .*body"),
        ("splits", r"splits has several splits; give one of .*splits/train, .*splits/test"),
        ("x.parquet", r"x\.parquet has no column 'text'; .*body"),
        ("y.parquet", r"y\.parquet has no text in field 'text'"),
    ):
        refused(says, [tmp_path / name], tokenizer, tmp_path / "out")


def test_no_tokenizer_and_no_text(tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "llama", "vocab_size": null}')
    for directory, says in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path, "holds no token"),
        (tmp_path / "damaged", "holds no token"),
        (tokenizer, "no sources are given"),
    ):
        refused(says, [], directory, tmp_path / "x")


def test_any_size_of_batch_writes_the_same(tokenizer, tmp_path, monkeypatch):
    """By documents and by characters, and transformers alone."""
    where = write_rows(tmp_path / "x.jsonl", 40)
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    texts = [json.loads(line)["text"] for line in where.read_text().splitlines()]
    expected = [token for text in texts for token in [*loaded(text)["input_ids"], 1]]
    for name, most in itertools.product(("BATCH_DOCUMENTS", "_BATCH_CHARACTERS"), (1, 7, 40, 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(tokenize_rows, name, most)
            tokenise([where], tokenizer, tmp_path / f"{name}{most}")
        assert tokens(tmp_path / f"{name}{most}") == expected


@pytest.mark.parametrize("own", ["_encode_plus", "__call__"])
def test_a_tokenizer_that_does_more_than_its_backend(tokenizer, own):
    """As CodeLlama's, and as every slow one: it is asked itself, text by text."""
    made = tokenize_rows.DocumentTokenizer(str(tokenizer))

    def more(self, text, **options):
        return {"input_ids": [len(text)]}

    made._tokenizer.__class__ = type("More", (type(made._tokenizer),), {own: more})
    assert list(made.documents(iter(["a b", "c"]))) == [[3, 1], [1, 1]]


def killed_before(place, write):
    """The status of a child that SIGKILL ends before its operation on files number ``place``."""
    if (child := os.fork()) == 0:
        kill = killing(place)
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "unlink")):
            before(pytest.MonkeyPatch(), owner, name, kill)
        write()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def small_pair(prefix):
    pair(prefix, [[k, 1] for k in range(5)], vocab_size=9, chat_template="x")


def test_killed_at_any_operation_it_is_complete_or_starts_again(tmp_path):
    """A kill leaves ``.NAME.PID.partial``, which nobody reads (kit/files.py)."""
    small_pair(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    assert sorted(whole) == [".bin", ".idx", ".json"]
    for place in itertools.count(1):
        out = tmp_path / f"{place}" / "x"
        if killed_before(place, lambda out=out: small_pair(out)) == 0:
            break
        with pytest.raises(DataError, match="exists") if out.with_suffix(".bin").exists() else nullcontext():
            small_pair(out)
        assert {path.name: path.read_bytes() for path in out.parent.glob("[!.]*")} == {
            f"x{suffix}": content for suffix, content in whole.items()
        }
    assert place > 12


def test_a_file_of_somebody_else_beside_a_killed_one_stays(tmp_path):
    files_in(tmp_path, {".x.bin.partial": "half", "x.json": "mine"})
    assert "x.json exists" in refusal(DataError, small_pair, tmp_path / "x")
    assert (tmp_path / "x.json").read_text() == "mine"


def test_two_processes_do_not_write_the_same_pair(tmp_path):
    with indexed_writer(tmp_path / "x", PairFormat(tokenizer="t", vocab_size=9)) as writer:
        writer.add_document([1, 2])
        assert "is being written by another process" in refusal(DataError, small_pair, tmp_path / "x")
        writer.add_document([3])
    assert tokens(tmp_path / "x") == [1, 2, 3]


def test_a_full_disk_leaves_nothing_and_the_same_command_starts_again(tokenizer, tmp_path):
    where = write_rows(tmp_path / "1.jsonl", 20_000)
    with full_disk(40_000), pytest.raises(DataError, match=r"writing .* failed: .*File too large"):
        tokenise([where], tokenizer, tmp_path / "out" / "x")
    assert not list((tmp_path / "out").iterdir())
    tokenise([where], tokenizer, tmp_path / "out" / "x")


def test_an_address_is_refused_and_workers_too(tokenizer, tmp_path):
    for more, says in (
        (["s3://bucket/a"], r"--out s3://bucket/a is an address; write the set to a disk, then copy"),
        (["x", "--workers", "2"], r"--workers 2: .*RAYON_NUM_THREADS limits them"),
    ):
        done = CliRunner().invoke(app, ["convert", "data", "x.txt", "--tokenizer", str(tokenizer), "--out", *more])
        assert re.search(says, str(done.exception))


def test_a_terminal_shows_how_much_is_done(tokenizer, tmp_path, monkeypatch):
    """And nothing else does."""
    terminal = mock.Mock(wraps=io.StringIO(), isatty=lambda: True, encoding="utf-8")
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        tokenise([write_rows(tmp_path / "x.jsonl", 60)], tokenizer, tmp_path / str(id(stream)))
        with progress_bar("parts", 200, done=50) as advance:
            advance(100)
        shown = [bool(re.search(what, stream.getvalue())) for what in (".", r"text.*100%", r"parts.* 75%")]
        assert shown == [stream is terminal] * 3

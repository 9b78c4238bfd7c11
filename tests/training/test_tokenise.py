"""Text → tokens: every kind of source, and everything that is refused before a file is written."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from kit.errors import DataError
from kit.training.data.encoder import BATCH_DOCUMENTS
from kit.training.data.indexed import IndexedTokens
from kit.training.data.tokenise import tokenise
from tests.training.test_conversion_resume import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A word-level tokenizer of seven words, with a config.json beside it as in a model's directory."""
    directory = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    return directory


def tokens(prefix):
    stream = IndexedTokens(prefix)
    return stream.read(0, len(stream)).tolist()


def test_every_kind_of_source(tokenizer, tmp_path):
    (tmp_path / "1.txt").write_text("a b\nc\n")
    (tmp_path / "2.jsonl").write_text('{"body": "d", "n": 1}\n\n{"body": ""}\n{"body": "e e"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "zzz"], "n": [1, 2]}), tmp_path / "3.parquet")
    datasets.Dataset.from_dict({"body": ["c d"], "n": [0]}).save_to_disk(tmp_path / "4")
    sources = [tmp_path / name for name in ("1.txt", "2.jsonl", "3.parquet", "4")]
    result = tokenise(sources, tokenizer, tmp_path / "out" / "train", text_key="body")
    assert tokens(tmp_path / "out" / "train") == [2, 3, 4, 1, 5, 1, 6, 6, 1, 2, 1, 0, 1, 4, 5, 1]
    assert (result.sidecar.num_documents, result.sidecar.max_token_id, result.sidecar.vocab_size) == (6, 6, 7)
    assert str(result) == f"{tmp_path}/out/train: 16 tokens in 6 documents, largest id 6"


def test_special_tokens_that_the_tokenizer_would_add_are_not(tokenizer, tmp_path):
    """Llama's puts a BOS before every text: a document ends with one token, and begins with none."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    loaded.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 0)]
    )
    loaded.save_pretrained(tmp_path / "adding")
    (tmp_path / "x.txt").write_text("a b")
    tokenise([tmp_path / "x.txt"], tmp_path / "adding", tmp_path / "x")
    assert tokens(tmp_path / "x") == [2, 3, 1]


def test_more_documents_than_a_batch(tokenizer, tmp_path):
    rows = ["abcde"[i % 5] for i in range(2 * BATCH_DOCUMENTS + 1)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    tokenise([tmp_path / "x.jsonl"], tokenizer, tmp_path / "x")
    assert tokens(tmp_path / "x")[::2] == [2 + i % 5 for i in range(len(rows))]


@pytest.mark.parametrize(("config", "asked", "last"), [(8, 6, 5), (5, None, 4), (5, 7, None), (7, None, None)])
def test_a_tokenizer_larger_than_the_model(tokenizer, tmp_path, config, asked, last):
    """What is asked for counts more than the config.json beside it."""
    (tmp_path / "x.txt").write_text("a")
    shutil.copytree(tokenizer, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": config}))
    said = f"has ids up to 6, and the model's vocabulary ends at {last}"
    with pytest.raises(DataError, match=said) if last else nullcontext():
        tokenise([tmp_path / "x.txt"], tmp_path / "model", tmp_path / "x", vocab_size=asked)
    assert bool(list(tmp_path.glob("x.bin*"))) == (last is None)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', r"bad\.jsonl:2 is not JSON Lines"),
        ("no-field.jsonl", b'{"body": "a"}\n', r"no-field\.jsonl:1 has no text in field 'text'"),
        ("latin.txt", b"\xe4\xf6", "is not readable as UTF-8"),
        ("x.pdf", b"%PDF", r"unknown suffix '\.pdf'"),
        ("bad.parquet", b"PAR0", "is not readable as Parquet"),
        ("empty.txt", b"", "have no text"),
        ("directory", None, "is not a data set saved with save_to_disk"),
        ("absent/x.txt", None, "does not exist"),
    ],
)
def test_sources_that_cannot_be_read(tokenizer, tmp_path, name, content, says):
    (tmp_path / "directory").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        tokenise([tmp_path / name], tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_tables_without_the_text(tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"body": ["a"]})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    for name, table in (("x.parquet", {"body": ["a"]}), ("y.parquet", {"text": [1]})):
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / name)
    for name, says in (
        ("saved", r"saved has no column 'text'; .*body"),
        ("splits", r"splits has several splits; give one of .*splits/train, .*splits/test"),
        ("x.parquet", r"x\.parquet has no column 'text'; .*body"),
        ("y.parquet", r"y\.parquet has no text in field 'text'"),
    ):
        with pytest.raises(DataError, match=says):
            tokenise([tmp_path / name], tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_rows_are_read_of_lines_of_json_alone(tokenizer, tmp_path):
    (tmp_path / "x.txt").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(DataError, match=r"x\.txt: rows for fine-tuning are read from \.jsonl files"):
        tokenise([tmp_path / "x.txt"], tokenizer, tmp_path / "out", objective="sft")


def test_no_tokenizer_and_no_text(tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "llama", "vocab_size": null}')
    for name, says in (("absent", "is not a directory"), (".", "holds no token"), ("damaged", "holds no token")):
        with pytest.raises(DataError, match=says):
            tokenise([], tmp_path / name, tmp_path / "x")
    with pytest.raises(DataError, match="no sources are given"):
        tokenise([], tokenizer, tmp_path / "x")

"""Text → tokens: every kind of source, and everything that is refused before a file is written."""

from __future__ import annotations

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kit.errors import DataError
from kit.training.data.encoder import BATCH_DOCUMENTS
from kit.training.data.indexed import IndexedTokens
from kit.training.data.tokenise import tokenise


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A word-level tokenizer of seven words, with a config.json beside it as in a model's directory."""
    words = {word: i for i, word in enumerate(["<unk>", "</s>", "a", "b", "c", "d", "e"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    wrapped.save_pretrained(directory)
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
    assert "16 tokens in 6 documents" in str(result)


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


def test_a_tokenizer_larger_than_the_model(tokenizer, tmp_path):
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match="has ids up to 6, and the model's vocabulary ends at 5"):
        tokenise([tmp_path / "x.txt"], tokenizer, tmp_path / "x", vocab_size=6)
    other = tmp_path / "model"
    other.mkdir()
    for path in tokenizer.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text('{"model_type": "llama", "vocab_size": 5}')
    with pytest.raises(DataError, match="vocabulary ends at 4"):
        tokenise([tmp_path / "x.txt"], other, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "x.txt"]


def test_sources_that_cannot_be_read(tokenizer, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "no-field.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xe4\xf6")
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "directory").mkdir()
    for name, message in {
        "bad.jsonl": "is not JSON Lines",
        "no-field.jsonl": r"no-field\.jsonl:1 has no text in field 'text'",
        "latin.txt": "is not readable as UTF-8",
        "x.pdf": r"unknown suffix '\.pdf'",
        "bad.parquet": "is not readable as Parquet",
        "empty.txt": "have no text",
        "directory": "is not a data set saved with save_to_disk",
        "absent": "does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            tokenise([tmp_path / name], tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_no_tokenizer(tmp_path):
    with pytest.raises(DataError, match="is not a directory"):
        tokenise([], tmp_path / "absent", tmp_path / "x")
    with pytest.raises(DataError, match="holds no tokenizer"):
        tokenise([], tmp_path, tmp_path / "x")

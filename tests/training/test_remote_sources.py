"""`kit convert data` from object storage: moto's S3 server, on this machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import boto3
import pytest

from kit.errors import DataError, SpecError
from kit.training.data.tokenise import tokenise
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.support.s3 import SECRET
from tests.training.test_tokenise import files, save_tokenizer, write_rows


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


def put(path: Path, key: str) -> None:
    boto3.client("s3").upload_file(str(path), "bucket", key)


@pytest.fixture
def corpus(s3, tmp_path):
    """Local sources, and the addresses of their copies."""
    import pyarrow
    import pyarrow.parquet

    here = [write_rows(tmp_path / f"part-{k}.jsonl", 10, first=k) for k in range(3)]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b", "c"], "n": [1, 2]}), tmp_path / "t.parquet")
    here += [tmp_path / "t.parquet", file_with(tmp_path / "t.txt", "e d")]
    for path in here:
        put(path, f"text/{path.name}")
    return here, ["s3://bucket/text/part-*.jsonl", "s3://bucket/text/t.parquet", "s3://bucket/text/t.txt"]


def test_objects_give_the_tokens_of_their_copies(corpus, tokenizer, tmp_path):
    here, there = corpus
    tokenise(here, tokenizer, tmp_path / "here" / "x")
    tokenise(there, tokenizer, tmp_path / "there" / "x")
    assert files(tmp_path / "there" / "x") == files(tmp_path / "here" / "x")


def test_a_failing_server_leaves_nothing_and_no_secret_is_said(s3, corpus, tokenizer, tmp_path):
    s3.fault = lambda method, key: 403 if method == "GET" and key.endswith("part-1.jsonl") else None
    said = refusal(DataError, tokenise, corpus[1], tokenizer, tmp_path / "there" / "x")
    assert re.search(r"part-1\.jsonl cannot be read .*credentials", said)
    assert SECRET not in said
    assert not list((tmp_path / "there").iterdir())


def test_what_is_not_there(corpus, tokenizer, tmp_path):
    for address, match in (
        ("s3://bucket/none.jsonl", r"s3://bucket/none\.jsonl does not exist"),
        ("s3://bucket/none-*.jsonl", "names no file"),
        ("s3://other/x.jsonl", "does not exist"),
        ("s3://bucket/text/", "names no file"),
    ):
        assert re.search(match, refusal(DataError, tokenise, [address], tokenizer, tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_a_missing_package_and_an_unknown_protocol(tokenizer, tmp_path, monkeypatch):
    assert "source=s4://b/x.jsonl cannot be opened" in refusal(
        SpecError, tokenise, ["s4://b/x.jsonl"], tokenizer, tmp_path / "out"
    )
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert "pip install 'deepspeed-megatron-kit[storage]'" in refusal(
        SpecError, tokenise, ["s3://b/x.jsonl"], tokenizer, tmp_path / "out"
    )

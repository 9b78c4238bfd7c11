"""`kit convert data` from object storage: moto's S3 server, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import boto3
import pytest

from kit.errors import DataError, SpecError
from kit.training.data import sources
from kit.training.data.tokenise import tokenise
from tests.support.s3 import SECRET, s3_server
from tests.training.test_conversion_resume import files, interrupted, save_tokenizer, write_rows


@pytest.fixture
def s3():
    with s3_server("bucket") as server:
        yield server


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


def put(path: Path, key: str) -> None:
    boto3.client("s3").upload_file(str(path), "bucket", key)


@pytest.fixture
def corpus(s3, tmp_path, monkeypatch):
    """Local sources, and the addresses of their copies."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(sources, "BLOCK_BYTES", 97)
    here = [write_rows(tmp_path / f"part-{k}.jsonl", 10, first=k) for k in range(3)]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b", "c"], "n": [1, 2]}), tmp_path / "t.parquet")
    (tmp_path / "t.txt").write_text("e d")
    here += [tmp_path / "t.parquet", tmp_path / "t.txt"]
    for path in here:
        put(path, f"text/{path.name}")
    return here, ["s3://bucket/text/part-*.jsonl", "s3://bucket/text/t.parquet", "s3://bucket/text/t.txt"]


@pytest.mark.everyday("1")
@pytest.mark.parametrize("workers", [1, 2])
def test_objects_give_the_tokens_of_their_copies(corpus, tokenizer, tmp_path, workers):
    here, there = corpus
    tokenise(here, tokenizer, tmp_path / "here" / "x")
    tokenise(there, tokenizer, tmp_path / "there" / "x", workers=workers)
    assert files(tmp_path / "there" / "x") == files(tmp_path / "here" / "x")


def test_a_failing_server_interrupts_and_a_changed_object_is_refused(s3, corpus, tokenizer, tmp_path):
    here, there = corpus
    tokenise(here, tokenizer, tmp_path / "here" / "x")
    s3.fault = lambda method, key: 403 if method == "GET" and key.endswith("part-1.jsonl") else None
    with pytest.raises(DataError, match=r"part-1\.jsonl cannot be read .*credentials.*10 documents are kept") as raised:
        tokenise(there, tokenizer, tmp_path / "there" / "x")
    assert SECRET not in str(raised.value)
    s3.fault = lambda method, key: None
    interrupted(there, tokenizer, tmp_path / "there" / "x", 3)
    put(here[1], "text/part-0.jsonl")
    with pytest.raises(DataError, match=r"part-0\.jsonl is another since its text was written .*ETag"):
        tokenise(there, tokenizer, tmp_path / "there" / "x")
    put(here[0], "text/part-0.jsonl")
    assert tokenise(there, tokenizer, tmp_path / "there" / "x").resumed_documents > 10
    assert files(tmp_path / "there" / "x") == files(tmp_path / "here" / "x")


def test_what_is_not_there(corpus, tokenizer, tmp_path):
    for address, match in (
        ("s3://bucket/none.jsonl", r"s3://bucket/none\.jsonl does not exist"),
        ("s3://bucket/none-*.jsonl", "names no file"),
        ("s3://other/x.jsonl", "does not exist"),
        ("s3://bucket/text/", "names no file"),
    ):
        with pytest.raises(DataError, match=match):
            tokenise([address], tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_missing_package_and_an_unknown_protocol(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(SpecError, match=r"source=s4://b/x\.jsonl cannot be opened"):
        tokenise(["s4://b/x.jsonl"], tokenizer, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SpecError, match=r"pip install 'deepspeed-megatron-kit\[storage\]'"):
        tokenise(["s3://b/x.jsonl"], tokenizer, tmp_path / "out")


def there(name: str = "a") -> dict[str, bytes]:
    """The objects of a set, by suffix."""
    client = boto3.client("s3")
    listed = client.list_objects_v2(Bucket="bucket", Prefix=f"sets/{name}.").get("Contents", [])
    return {
        each["Key"].removeprefix(f"sets/{name}"): client.get_object(Bucket="bucket", Key=each["Key"])["Body"].read()
        for each in listed
    }


class TestASetForObjectStorage:
    OUT = "s3://bucket/sets/a"

    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")

    @pytest.fixture
    def expected(self, corpus, tokenizer, tmp_path):
        tokenise(corpus[0], tokenizer, tmp_path / "local" / "a")
        return files(tmp_path / "local" / "a")

    @pytest.mark.everyday("named")
    @pytest.mark.parametrize("work", [None, "named"])
    def test_is_that_of_a_disk_and_leaves_nothing_there(self, corpus, tokenizer, tmp_path, expected, work):
        done = tokenise(corpus[0], tokenizer, self.OUT, work=work)
        assert str(done).startswith("s3://bucket/sets/a: ")
        assert there() == expected
        assert not list((tmp_path / "here").iterdir())

    def test_is_never_written_over(self, corpus, tokenizer, tmp_path, expected):
        tokenise(corpus[0][:1], tokenizer, self.OUT)
        first = there()
        with pytest.raises(DataError, match=r"s3://bucket/sets/a\.bin exists; choose another prefix"):
            tokenise(corpus[0], tokenizer, self.OUT)
        assert there() == first
        assert not list((tmp_path / "here").iterdir())

    @pytest.mark.everyday(".idx")
    @pytest.mark.parametrize("fails", [".bin", ".idx", ".json"])
    def test_goes_on_with_what_is_missing(self, s3, corpus, tokenizer, tmp_path, expected, fails):
        self.fails(s3, corpus, tokenizer, fails)
        order = [".bin", ".idx", ".json"]
        rest = order[order.index(fails) :]
        assert sorted(there()) == order[: order.index(fails)]  # without its sidecar a set is not complete
        puts = []
        s3.fault = lambda method, key: puts.append(key) if method == "PUT" else None
        assert tokenise(corpus[0], tokenizer, self.OUT).resumed_documents == 33
        assert [key for key in puts if "/a." in key] == [f"/bucket/sets/a{each}" for each in rest]
        assert there() == expected
        assert not list((tmp_path / "here").iterdir())

    def fails(self, s3, corpus, tokenizer, suffix):
        s3.fault = lambda method, key: 503 if method == "PUT" and key.endswith(f"a{suffix}") else None
        says = rf"uploading a\{suffix} to s3://bucket/sets failed.*the same command goes on"
        with pytest.raises(DataError, match=says):
            tokenise(corpus[0], tokenizer, self.OUT)
        s3.fault = lambda method, key: None

    def test_what_is_there_of_another_time_is_sent_again(self, s3, corpus, tokenizer, expected):
        """The size is the same, the version is not."""
        self.fails(s3, corpus, tokenizer, ".idx")
        boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.bin", Body=b"x" * len(expected[".bin"]))
        tokenise(corpus[0], tokenizer, self.OUT)
        assert there() == expected

    def test_another_set_that_came_meanwhile_stays(self, s3, corpus, tokenizer):
        self.fails(s3, corpus, tokenizer, ".json")
        boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.json", Body=b"{}")
        with pytest.raises(DataError, match=r"s3://bucket/sets/a\.json is of another set"):
            tokenise(corpus[0], tokenizer, self.OUT)
        assert there()[".json"] == b"{}"

    @pytest.mark.nightly
    def test_an_upload_for_another_address_is_not_taken(self, s3, corpus, tokenizer):
        self.fails(s3, corpus, tokenizer, ".bin")
        with pytest.raises(DataError, match="was made with out=s3://bucket/sets/a and this command has s3://bucket/a"):
            tokenise(corpus[0], tokenizer, "s3://bucket/a")

    def test_an_address_of_no_use_is_an_error_before_the_work(self, corpus, tokenizer, tmp_path):
        for out, match in (
            ("s3://no-such-bucket/sets/a", "writing s3://no-such-bucket/sets failed"),
            ("s3://bucket", "names no file in it"),
            ("s3://key:hunter2@bucket/a", "holds credentials"),
            ("s4://bucket/a", "cannot be opened"),
        ):
            with pytest.raises((DataError, SpecError), match=match) as raised:
                tokenise(corpus[0], tokenizer, out)
            assert "hunter2" not in str(raised.value)
        assert not list((tmp_path / "here").iterdir())

    def test_a_working_directory_is_for_addresses(self, corpus, tokenizer, tmp_path):
        with pytest.raises(DataError, match="--work"):
            tokenise(corpus[0], tokenizer, tmp_path / "x", work=tmp_path)

    def test_a_truncated_copy_is_noticed(self, s3, corpus, tokenizer, monkeypatch):
        def cut(self, path, copy, **_):
            self.pipe_file(copy, Path(path).read_bytes()[:-1])

        monkeypatch.setattr("s3fs.S3FileSystem.put_file", cut)
        with pytest.raises(DataError, match=r"a\.bin has \d+ bytes after its upload, not"):
            tokenise(corpus[0], tokenizer, self.OUT)
        assert ".json" not in there()

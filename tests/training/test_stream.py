"""Samples of a stream: those of a converted pair, on every layout, from every place, and of every kind of file."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from itertools import chain
from pathlib import Path

import boto3
import datasets
import numpy as np
import pytest
import s3fs

from kit.errors import CheckpointError, DataError, SpecError
from kit.specs.run import BlendedSetSpec, DataSpec, StreamSpec
from kit.training.data import stream as stream_module
from kit.training.data.indexed import IndexedTokens
from kit.training.data.loader import DataParallelShard, training_batches
from kit.training.data.samples import GptSamples
from kit.training.data.stream import StreamSamples
from kit.training.data.stream_source import StreamSource, open_source
from kit.training.data.tokenise import tokenise
from kit.training.stream_cursor import StreamCursor, newest
from tests.support import tiny
from tests.support.refusals import refusal
from tests.training.streamed import READERS, all_documents, samples, spec, texts, write
from tests.training.test_tokenise import save_tokenizer

DOCUMENTS = texts(120)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The windows of the pair that ``kit convert data`` writes of the documents."""
    directory = tmp_path_factory.mktemp("pair")
    (rows,) = write(directory, "jsonl", DOCUMENTS)
    data = spec(directory, [rows])
    tokenise([rows], data.stream.tokenizer, directory / "x", vocab_size=tiny.VOCAB_SIZE)
    pair = GptSamples(IndexedTokens(directory / "x"), tiny.SEQ_LENGTH, tiny.VOCAB_SIZE)
    return [window for window, _ in pair.read_all(range(len(pair)))]


def windows(data: DataSpec, count: int) -> np.ndarray:
    """The first of a reader that has just been opened."""
    found = samples(data)
    return np.stack([found.read(position) for position in range(count)])


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kind", READERS)
def test_the_windows_are_those_of_a_pair(tmp_path, pair, kind, files, monkeypatch):
    """In the order of the files, over the ends of blocks; after the last the first comes again."""
    monkeypatch.setattr(stream_module, "_READ_DOCUMENTS", 9)
    data = spec(tmp_path, write(tmp_path, kind, DOCUMENTS, files), kind, streams=1, shuffle_block=0)
    assert len(pair) > 100
    assert np.array_equal(windows(data, len(pair) + 3), [*pair, *pair[:3]])


@pytest.mark.parametrize(("files", "streams"), [(1, 1), (3, 3), (7, 3), (6, 2), (3, 6), (3, 7), (1, 4)])
def test_an_epoch_has_each_document_once(tmp_path, files, streams):
    found = samples(spec(tmp_path, write(tmp_path, "jsonl", DOCUMENTS, files), streams=streams))
    per_epoch = [[all_documents(found, stream, epoch) for stream in range(streams)] for epoch in range(3)]
    assert [sorted(chain(*epoch)) for epoch in per_epoch] == [sorted(DOCUMENTS)] * 3
    if files > 2 * streams:  # files are shuffled
        assert per_epoch[0] != per_epoch[1]
    opened = [{place for place, _, _ in found._streams[v]._documents(StreamCursor(stream=v))} for v in range(streams)]
    assert all(len(each) == max(1, len(range(v, files, streams))) for v, each in enumerate(opened))


def test_the_number_of_streams_follows_from_the_files(tmp_path):
    for files, streams in ((1, 1), (3, 2), (70, 64)):
        found = samples(spec(tmp_path, write(tmp_path, "txt", DOCUMENTS, files, f"of-{files}"), "txt"))
        assert len(found._streams) == streams


def test_blocks_are_shuffled_by_the_seed(tmp_path):
    files = write(tmp_path, "jsonl", DOCUMENTS, 2)
    usual = {"streams": 2, "shuffle_block": 16}
    first = windows(spec(tmp_path, files, **usual), 300)
    assert (windows(spec(tmp_path, files, **usual), 300) == first).all()
    assert all(
        (windows(spec(tmp_path, files, **(usual | other)), 300) != first).any()
        for other in ({"seed": 5}, {"shuffle_block": 0}, {"shuffle_block": 17}, {"streams": 1})
    )
    (stream,) = samples(spec(tmp_path, files, streams=1, shuffle_block=16))._streams
    blocks, again = (
        [tokens.tolist() for _, tokens in stream._blocks(StreamCursor(stream=0, epoch=epoch))] for epoch in (0, 1)
    )
    assert sorted(chain(*blocks)) == sorted(chain(*again))
    assert blocks != again


# Bookmarks: A reader that begins at the bookmarks of another reads what the other goes on to read.


@pytest.mark.everyday("5-2-8-jsonl", "2-4-3-parquet")
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(("files", "streams", "block"), [(1, 1, 0), (5, 2, 8), (2, 4, 3), (3, 2, 1000), (3, 3, 2)])
def test_from_every_place(tmp_path, kind, files, streams, block, monkeypatch):
    monkeypatch.setattr(stream_module, "_READ_DOCUMENTS", 9)
    data = spec(tmp_path, write(tmp_path, kind, DOCUMENTS, files), kind, streams=streams, shuffle_block=block)
    whole = samples(data)
    expected = [whole.read(position) for position in range(450)]  # several epochs
    here = samples(data)
    for position in range(0, 440, 11 if block else 5):
        if position:
            here.read(position - 1)
        there = samples(data) if position % 2 else whole
        there.resume(here.place(position))
        assert [
            ahead
            for ahead in range(position, min(position + 2 * streams, 450))
            if (there.read(ahead) != expected[ahead]).any()
        ] == []


def test_little_is_read_again(tmp_path, monkeypatch):
    """A document once by who reads on; after a resume those of a block or two of a stream; else all before."""
    files, read = write(tmp_path, "jsonl", texts(400), 2), []
    data, real = spec(tmp_path, files, streams=2, shuffle_block=10), StreamSource.documents

    def documents(self, file, start, *share):
        for number, text in real(self, file, start, *share):
            read.append((file, number))
            yield number, text

    monkeypatch.setattr(StreamSource, "documents", documents)
    here = samples(data)
    for position in range(200):
        here.read(position)
    assert len(read) == len(set(read)) > 100
    there, place = samples(data), here.place(200)
    there.resume(place)
    read.clear()
    assert (there.read(200) == here.read(200)).all()
    assert len(read) <= 50
    read.clear()
    assert (samples(data).read(200) == here.read(200)).all()
    assert len(read) > 80


def test_what_differs_is_named(tmp_path):
    files = write(tmp_path, "jsonl", DOCUMENTS, 3)
    usual = {"files": files, "streams": 2}
    place = samples(spec(tmp_path, **usual)).place(0)
    samples(spec(tmp_path, **usual)).resume(place)
    other = save_tokenizer(tmp_path / "other" / "tokenizer", [*"abc"])
    for match, options in (
        (r"streams=2, and this run has 1", {"streams": 1}),
        (r"data\.seed=1234, and this run has 5", {"seed": 5}),
        (r"shuffle_block=1000, and this run has 0", {"shuffle_block": 0}),
        (r"of 3 files, and there are 2", {"files": files[:2]}),
        (r"other files: .*part-1\.jsonl", {"files": [files[1], files[0], files[2]]}),
        (r"tokenizer=tokenizer \(\w+\), and this run has tokenizer \(", {"tokenizer": str(other)}),
    ):
        reader = samples(spec(tmp_path, **(usual | options)))
        assert re.search(match, refusal(CheckpointError, reader.resume, place))
    os.utime(files[1], ns=(1, 1))
    said = refusal(CheckpointError, samples(spec(tmp_path, **usual)).resume, place)
    assert re.search(r"other files: .*part-1\.jsonl has another name, .* restore it", said)


def test_windows_in_any_order(tmp_path):
    """A rewind skips samples; a thread that read ahead is asked for what is before it."""
    data = spec(tmp_path, write(tmp_path, "parquet", DOCUMENTS, 3), "parquet", streams=3, shuffle_block=8)
    whole, found, generator = windows(data, 200), samples(data), random.Random(0)
    positions = [*range(20), *(generator.randrange(200) for _ in range(80))]
    assert [position for position in positions if (found.read(position) != whole[position]).any()] == []


def reads_its_share(found: StreamSamples, whole: StreamSamples, steps: int, shard: DataParallelShard) -> None:
    """A rank's micro batches of steps of eight samples are its windows among ``whole``."""
    for step in range(steps):
        for number, batch in enumerate(training_batches(found, 0, 8 * step, shard)):
            own = np.stack([whole.read(8 * step + k) for k in shard.positions(number)])
            assert np.array_equal([batch.input_ids, batch.labels], [own[:, :-1], own[:, 1:]])


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.nightly
def test_every_layout_has_the_same_samples_and_its_share_of_the_streams(tmp_path, streams):
    data = spec(tmp_path, write(tmp_path, "jsonl", DOCUMENTS, streams), streams=streams)
    whole = samples(data)
    for dp, mbs in ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2)):
        for rank in range(dp):
            found = samples(data)
            reads_its_share(found, whole, 3, DataParallelShard(mbs, 8 // (dp * mbs), rank, dp))
            used = [stream for stream in found._streams if stream._windows is not None]
            assert len(used) == (max(mbs, streams // dp) if streams % (dp * mbs) == 0 else min(streams, len(used)))


# Object storage


@pytest.mark.everyday("parquet")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_rank_requests_its_share_and_keeps_no_copy(s3, tmp_path, kind, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("TMPDIR", str(cache))
    monkeypatch.setattr("tempfile.tempdir", None)
    cache.mkdir()
    files = write(tmp_path / "here", kind, DOCUMENTS, 4)
    for path in files:
        boto3.client("s3").upload_file(str(path), "bucket", path.name)
    requested: list[str] = []
    s3.fault = lambda method, key: requested.append(Path(key).name) if method == "GET" else None
    data = spec(tmp_path, [f"s3://bucket/part-*.{kind}"], kind, streams=4)
    here = samples(spec(tmp_path, files, kind, streams=4))
    for rank in range(2):
        found = samples(data)
        opened = set(requested)
        requested.clear()
        reads_its_share(found, here, 6, DataParallelShard(2, 2, rank, 2))
        assert set(requested) == {f"part-{v}.{kind}" for v in (2 * rank, 2 * rank + 1)}
        assert opened <= {"bucket", f"part-0.{kind}"}
        requested.clear()
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 0]


def test_a_changed_object_is_refused_and_a_failing_server_named(s3, tmp_path):
    (path,) = write(tmp_path / "here", "jsonl", DOCUMENTS)
    boto3.client("s3").upload_file(str(path), "bucket", "part.jsonl")
    data = spec(tmp_path, ["s3://bucket/part.jsonl"])
    place = samples(data).place(0)
    samples(data).resume(place)
    boto3.client("s3").put_object(Bucket="bucket", Key="part.jsonl", Body=b'{"text": "w1"}\n' * 100)
    s3fs.S3FileSystem.clear_instance_cache()
    said = refusal(CheckpointError, samples(data).resume, place)
    assert "s3://bucket/part.jsonl has another name, size, time or ETag" in said
    boto3.client("s3").upload_file(str(path), "bucket", "part.jsonl.gz")
    for address, says in (
        ("s3://other/part.jsonl", r"run\.data\.stream\.path=json cannot be read .*credentials"),
        ("s3://bucket/part.jsonl.gz", r"part\.jsonl\.gz: datasets reads no compressed objects of S3"),
    ):
        assert re.search(says, refusal(DataError, open_source, spec(tmp_path, [address]).stream))


# Bad input


def test_the_end_without_wrap(tmp_path, pair):
    found = samples(spec(tmp_path, write(tmp_path, "jsonl", DOCUMENTS), streams=1, shuffle_block=0, wrap=False))
    assert (found.read(len(pair) - 1) == pair[-1]).all()
    says = rf"wrap=false: .* so the run has none after {len(pair):,}; end it"
    for _ in range(2):
        assert re.search(says, refusal(DataError, found.read, len(pair)))
    assert (found.read(3) == pair[3]).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"text_key": "body"}, r"no column 'body'; run\.data\.stream\.text_key: valid are n, text"),
        ({"text_key": "n"}, r"row 0 has no text in column 'n'"),
        ({"data_files": ("none-*.jsonl",)}, r"split=train: json finds no files; check split and data_files"),
        ({"data_files": ("none.jsonl",)}, r"cannot be read \(Unable to find"),
        ({"tokenizer": "nowhere"}, "is not a directory"),
        ({"path": "parquet"}, "cannot be read"),
        ({"streams": 120}, r"has less text than one sample of seq_length=32"),
    ],
)
def test_of_the_sources(tmp_path, change, match):
    data = spec(tmp_path, write(tmp_path, "jsonl", DOCUMENTS))
    changed = dataclasses.replace(data, stream=dataclasses.replace(data.stream, **change))
    assert re.search(match, refusal(DataError, windows, changed, 120))


def test_another_vocabulary_and_a_damaged_row(tmp_path):
    data = spec(tmp_path, files := write(tmp_path, "jsonl", DOCUMENTS))
    assert "the model's vocabulary ends at 49" in refusal(DataError, StreamSamples, data, 32, 50)
    for row, match in (('{"text": null}', r"part-0\.jsonl: row 1 has no text"), ("no json", "cannot be read")):
        files[0].write_text(f'{{"text": "w1"}}\n{row}\n')
        assert re.search(match, refusal(DataError, windows, data, 1))


@pytest.mark.parametrize(
    ("of_data", "of_stream", "match"),
    [
        ({"train": "a"}, {}, "train=a and stream are both there"),
        ({"blend": {"a": BlendedSetSpec(path="a", weight=1)}}, {}, "blend and stream are both there"),
        ({"packing": True}, {}, "packing with stream"),
        ({}, {"split": "train[:10]"}, r"split=train\[:10\] is not one whole split"),
        ({}, {"path": "./x"}, r"path=\./x is a file or directory; use path=json or parquet or text"),
        ({}, {"data_files": ()}, "path=json without data_files"),
        ({}, {"data_files": ("s3://key:secret@bucket/x",)}, "holds credentials"),
    ],
)
def test_of_the_recipe(of_data, of_stream, match):
    stream = {"path": "json", "data_files": ("x.jsonl",), "tokenizer": "t"}
    assert re.search(
        match,
        refusal((SpecError, ValueError), lambda: DataSpec(stream=StreamSpec(**(stream | of_stream)), **of_data)),
    )


def test_the_last_bookmark_of_each_stream():
    marks = [StreamCursor(stream=s, window=w) for s, w in ((1, 0), (0, 3), (1, 5), (0, 2))]
    assert newest(marks) == (marks[1], marks[2])

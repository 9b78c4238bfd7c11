"""Tokenised data: the file format against megatron-core's, samples, layouts, damage; and their order."""

from __future__ import annotations

import itertools
import re
import struct

import numpy as np
import pytest
import torch

from kit.engines.protocol import IGNORE_INDEX
from kit.errors import DataError
from kit.training.data.indexed import IndexedTokens, PairFormat
from kit.training.data.indexed_writer import indexed_writer
from kit.training.data.loader import DataLoader, DataParallelShard, training_batches, validation_batches
from kit.training.data.samples import GptSamples
from kit.training.data.shuffle import permuted_index
from tests.support import tiny
from tests.support.refusals import refusal
from tests.training.disk import full_disk
from tests.training.pairs import pair


@pytest.fixture
def prefix(tmp_path):
    return pair(tmp_path / "train", tiny.documents())


# Format


@pytest.mark.parametrize("vocab_size", [128, 65499, 65500, 200_000])
def test_megatron_reads_what_we_write(tmp_path, vocab_size):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    documents = [*tiny.documents(), np.array([vocab_size - 1, 0])]
    theirs = IndexedDataset(
        str(pair(tmp_path / "train", documents, vocab_size=vocab_size)), multimodal=False, mmap=True
    )
    assert theirs.index.dtype is DType.optimal_dtype(vocab_size)
    found = [theirs[i].tolist() for i in range(len(theirs))], theirs.document_indices.tolist()
    assert found == ([document.tolist() for document in documents], list(range(len(documents) + 1)))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_we_read_what_megatron_writes(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/x.bin", dtype=dtype)
    for document in tiny.documents():
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(f"{tmp_path}/x.idx")
    tokens = IndexedTokens(tmp_path / "x")
    assert tokens.read(0, len(tokens)).tolist() == np.concatenate(tiny.documents()).tolist()
    assert (tokens.read(0, 3).dtype, tokens.sidecar) == (np.int64, None)
    assert (tokens.sequence_lengths.tolist(), tokens.document_indices.tolist()) == (
        [len(document) for document in tiny.documents()],
        list(range(len(tiny.documents()) + 1)),
    )


def test_sidecar(prefix):
    sidecar = IndexedTokens(prefix).sidecar
    stream = np.concatenate(tiny.documents())
    assert (sidecar.num_tokens, sidecar.num_documents, sidecar.max_token_id) == (len(stream), 40, stream.max())
    assert (sidecar.tokenizer, sidecar.vocab_size, sidecar.longest) == ("tiny", tiny.VOCAB_SIZE, 0)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_refuses_to_overwrite(prefix, suffix):
    for other in {".bin", ".idx", ".json"} - {suffix}:
        prefix.with_suffix(other).unlink()
    before = prefix.with_suffix(suffix).read_bytes()
    assert re.search(rf"train\{suffix} exists", refusal(DataError, lambda: pair(prefix, [np.arange(5)])))
    assert prefix.with_suffix(suffix).read_bytes() == before


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([[1, 2], [-1]], "token id -1 of tiny is outside its vocabulary of 128"),
        ([[1, 128]], "token id 128 of tiny is outside its vocabulary of 128"),
        ([[]], "no text"),
        ([np.zeros(10_000, dtype=int)] * 10, "check the free space"),
    ],
)
def test_a_failed_write_leaves_nothing(tmp_path, documents, says):
    """The last one on a full disk."""
    with full_disk(100_000), pytest.raises(DataError, match=says):
        pair(tmp_path / "x", documents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("objective", "longest"), [("pretrain", 0), ("sft", 7), ("seq2seq", 4)])
def test_what_was_written_is_counted(tmp_path, objective, longest):
    """Two rows of 3 + 4 and 2 + 1 tokens; no row; one row more."""
    with indexed_writer(tmp_path / "x", PairFormat(tokenizer="t", vocab_size=9, objective=objective)) as writer:
        for rows in ([[[1, 2, 3], [4, 5, 6, 7]], [[1, 8], [2]]], [], [[[3], [3]]]):
            writer.add_rows(rows)
    written = writer.sidecar()
    assert (written.num_tokens, written.num_documents, written.max_token_id, written.longest) == (12, 3, 8, longest)
    assert IndexedTokens(tmp_path / "x").sequence_lengths.tolist() == [3, 4, 2, 1, 1, 1]


def at(place, data):
    """Damage: other bytes at a place of a file."""
    return lambda content: content[:place] + data + content[place + len(data) :]


@pytest.mark.parametrize(
    ("suffix", "damage", "says"),
    [
        (".bin", None, r"train\.bin is missing; make it with: kit convert data"),
        (".idx", None, r"train\.idx is missing; make it with: kit convert data"),
        (".bin", lambda content: content[:-1], r"train\.bin has \d+ bytes where its index asks for \d+"),
        (".bin", lambda content: b"", r"train\.bin has 0 bytes"),
        (".idx", lambda content: content[:-1], r"train\.idx has \d+ bytes where its header asks for \d+"),
        (".idx", lambda content: content + b"\0", r"train\.idx has \d+ bytes where its header asks for"),
        (".idx", lambda content: content[:40], r"train\.idx has 40 bytes where its header asks for"),
        (".idx", lambda content: content[:10], r"train\.idx has 10 bytes, less than a header"),
        (".idx", at(0, b"PNG"), "does not start with Megatron's MMIDIDX"),
        (".idx", at(9, struct.pack("<Q", 2)), "has version 2, this reader knows 1"),
        (".idx", at(17, b"\x07"), "has dtype code 7, which is not an integer type"),
        (".idx", at(18, struct.pack("<Q", 2**62)), "bytes where its header asks for"),
        (".idx", lambda content: at(18, struct.pack("<QQ", 0, 1))(content)[:42], "has no documents"),
        (".json", lambda content: b"{}", "is not the sidecar"),
        (".json", lambda content: content.replace(b'"num_tokens": ', b'"num_tokens": 1'), "belongs to another pair"),
    ],
)
def test_a_damaged_pair_is_named(prefix, suffix, damage, says):
    path = prefix.with_suffix(suffix)
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(content))
    assert re.search(says, refusal(DataError, IndexedTokens, prefix))


def test_an_index_of_megatrons_with_modes_is_read(prefix):
    """A multimodal index has a byte more a sequence."""
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes() + bytes(len(tiny.documents())))
    assert len(IndexedTokens(prefix)) == len(np.concatenate(tiny.documents()))


# Samples


def test_windows_over_the_stream(prefix):
    stream = np.concatenate(tiny.documents())
    samples = GptSamples(IndexedTokens(prefix), 32, tiny.VOCAB_SIZE)
    assert len(samples) == (len(stream) - 1) // 32
    assert (samples.num_tokens, samples.length(3)) == (32 * len(samples), 32)
    for index in (0, 1, len(samples) - 1):
        (batch,) = samples.micro_batches([[index]])
        assert batch.input_ids.tolist() == [stream[index * 32 : index * 32 + 32].tolist()]
        assert batch.labels.tolist() == [stream[index * 32 + 1 : index * 32 + 33].tolist()]


def test_exactly_one_sample_and_one_token_less(tmp_path):
    assert len(GptSamples(IndexedTokens(pair(tmp_path / "a", [np.arange(33)])), 32, 128)) == 1
    assert "has 32 tokens, and one sample of seq_length=32 takes 33" in refusal(
        DataError, GptSamples, IndexedTokens(pair(tmp_path / "b", [np.arange(32)])), 32, 128
    )


def test_ids_beyond_the_model_are_found_before_training(prefix):
    largest = int(np.concatenate(tiny.documents()).max())
    GptSamples(IndexedTokens(prefix), 32, largest + 1)
    assert re.search(
        f"token id {largest} in .* outside the model's vocabulary of {largest}",
        refusal(DataError, GptSamples, IndexedTokens(prefix), 32, largest),
    )


def test_without_a_sidecar_they_are_found_when_read(tmp_path):
    prefix = pair(tmp_path / "train", [np.zeros(64, dtype=int), np.full(64, 120)])
    prefix.with_suffix(".json").unlink()
    samples = GptSamples(IndexedTokens(prefix), 32, 100)
    assert samples.micro_batches([[0]])[0].input_ids.sum() == 0
    assert "token id 120" in refusal(DataError, samples.micro_batches, [[2]])


# Batches


@pytest.fixture
def samples(prefix):
    return GptSamples(IndexedTokens(prefix), 32, tiny.VOCAB_SIZE)


@pytest.mark.parametrize("samples_seen", [0, 8, 40])
def test_a_step_is_the_same_samples_in_the_same_order_on_every_layout(samples, samples_seen):
    expected = [
        w.tolist() for w, _ in samples.read_all([permuted_index(5, len(samples), samples_seen + k) for k in range(8)])
    ]
    for dp, mbs, accumulation in [c for c in itertools.product([1, 2, 4, 8], repeat=3) if np.prod(c) == 8]:
        shards = [DataParallelShard(mbs, accumulation, r, dp) for r in range(dp)]
        ranks = [training_batches(samples, 5, samples_seen, shard) for shard in shards]
        # Micro batch a of all ranks in rank order, then micro batch a + 1: that is the step's order.
        assert [
            [*inputs.tolist(), labels.tolist()[-1]]
            for a in range(accumulation)
            for rank in ranks
            for inputs, labels in zip(rank[a].input_ids, rank[a].labels, strict=True)
        ] == expected
        assert all(torch.equal(b.input_ids[:, 1:], b.labels[:, :-1]) for rank in ranks for b in rank)


def test_a_smaller_step_of_a_ramp_is_its_samples_once_over_all_ranks(samples):
    feeds = [DataLoader(samples, {}, DataParallelShard(2, 4, rank, 2), 5, 0) for rank in range(2)]
    found = sorted(row.tolist() for feed in feeds for batch in feed.step(16, 8) for row in batch.input_ids)
    windows = samples.read_all([permuted_index(5, len(samples), 16 + k) for k in range(8)])
    assert found == sorted(window[:-1].tolist() for window, _ in windows)


@pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("asked", [1, 7, 1000])
def test_validation_counts_every_sequence_once(samples, dp, mbs, asked):
    total = min(asked, len(samples))
    ranks = [validation_batches(samples, asked, DataParallelShard(mbs, 1, rank, dp)) for rank in range(dp)]
    assert {len(batches) for batches in ranks} == {-(-total // (mbs * dp))}
    labels = torch.cat([batch.labels for batches in ranks for batch in batches])
    counting = (labels != IGNORE_INDEX).all(dim=1)
    assert (labels[~counting] == IGNORE_INDEX).all()
    expected = [window[1:].tolist() for window, _ in samples.read_all(range(total))]
    assert sorted(labels[counting].tolist()) == sorted(expected)


# Order: A permutation, the same everywhere, computed at any position.


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 16, 17, 1000, 4097])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_epoch_is_a_permutation(num_samples, epoch):
    first = epoch * num_samples
    assert sorted(permuted_index(3, num_samples, first + k) for k in range(num_samples)) == list(range(num_samples))


@pytest.mark.parametrize(
    ("seed", "num_samples", "epoch", "expected"),
    [
        (1234, 1000, 0, [675, 661, 45, 199, 283, 288, 732, 786]),
        (1234, 1000, 1, [606, 840, 318, 568, 619, 713, 837, 475]),
        (1234, 1000, 5000, [598, 748, 593, 57, 312, 702, 634, 496]),
        (7, 4096, 0, [3911, 2409, 1434, 54, 1322, 1181]),  # exactly 12 bits
        (5, 4097, 3, [2490, 4001, 2607, 2975, 3766, 3218, 1198, 3928]),
        (0, 10**12, 1, [839808310234, 309694908258, 639117111964, 38234005728, 139133804694, 769225497101]),
    ],
)
def test_golden_values(seed, num_samples, epoch, expected):
    """Of an implementation by ``divmod`` and numpy's unsigned integers. A change would silently reorder the data of
    every run that is resumed."""
    first = epoch * num_samples
    assert [permuted_index(seed, num_samples, first + k) for k in range(len(expected))] == expected

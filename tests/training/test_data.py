"""Tokenised data: the file format against megatron-core's, samples, layouts, damage, tokenising."""

from __future__ import annotations

import struct
from itertools import product

import numpy as np
import pytest
import torch

from kit.engines.base import IGNORE_INDEX
from kit.errors import DataError
from kit.training.data.indexed import IndexedTokens
from kit.training.data.indexed_writer import IndexedWriter
from kit.training.data.loader import DataLoader, DataParallelShard, training_batches, validation_batches
from kit.training.data.order import order
from kit.training.data.samples import GptSamples
from tests.support import tiny
from tests.training.disk import full_disk


def write(prefix, documents, vocab_size=tiny.VOCAB_SIZE):
    """A pair with these documents."""
    with IndexedWriter(prefix, tokenizer="tiny", vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "train", tiny.documents())


class TestFormat:
    @pytest.mark.parametrize("vocab_size", [128, 65499, 65500, 200_000])
    def test_megatron_reads_what_we_write(self, tmp_path, vocab_size):
        from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

        documents = [*tiny.documents(), np.array([vocab_size - 1, 0])]
        prefix = write(tmp_path / "train", documents, vocab_size)
        theirs = IndexedDataset(str(prefix), multimodal=False, mmap=True)
        assert theirs.index.dtype is DType.optimal_dtype(vocab_size)
        assert len(theirs) == len(documents)
        assert all(np.array_equal(theirs[i], document) for i, document in enumerate(documents))
        assert theirs.document_indices.tolist() == list(range(len(documents) + 1))

    def test_we_read_what_megatron_writes(self, tmp_path):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        documents = tiny.documents()
        for dtype in (np.uint16, np.int32, np.int64):
            prefix = tmp_path / np.dtype(dtype).name
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
            for document in documents:
                builder.add_item(torch.from_numpy(document))
                builder.end_document()
            builder.finalize(f"{prefix}.idx")
            tokens = IndexedTokens(prefix)
            assert np.array_equal(tokens.read(0, len(tokens)), np.concatenate(documents))
            assert tokens.read(0, 3).dtype == np.int64
            assert tokens.sequence_lengths.tolist() == [len(document) for document in documents]
            assert tokens.document_indices.tolist() == list(range(len(documents) + 1))
            assert tokens.sidecar is None

    def test_our_reader_agrees_with_megatrons_on_our_files(self, prefix):
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        theirs = IndexedDataset(str(prefix), multimodal=False, mmap=True)
        ours = IndexedTokens(prefix)
        assert np.array_equal(ours.read(0, len(ours)), np.concatenate([theirs[i] for i in range(len(theirs))]))
        assert np.array_equal(ours.sequence_lengths, theirs.sequence_lengths)

    def test_sidecar(self, prefix):
        sidecar = IndexedTokens(prefix).sidecar
        stream = np.concatenate(tiny.documents())
        assert (sidecar.num_tokens, sidecar.num_documents, sidecar.max_token_id) == (len(stream), 40, stream.max())
        assert (sidecar.tokenizer, sidecar.vocab_size) == ("tiny", tiny.VOCAB_SIZE)

    def test_refuses_to_overwrite(self, prefix):
        before = prefix.with_suffix(".bin").read_bytes()
        with pytest.raises(DataError, match=r"train\.bin exists"):
            write(prefix, [np.arange(5)])
        assert prefix.with_suffix(".bin").read_bytes() == before

    def test_a_failed_write_leaves_nothing(self, tmp_path):
        with pytest.raises(DataError, match="token id -1"):
            write(tmp_path / "x", [[1, 2], [-1]])
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_named_and_leaves_nothing(self, tmp_path):
        with full_disk(100_000), pytest.raises(DataError, match="check the free space"):
            write(tmp_path / "x", [np.zeros(10_000, dtype=int)] * 10)
        assert list(tmp_path.iterdir()) == []

    def test_ids_outside_the_vocabulary(self, tmp_path):
        with pytest.raises(DataError, match="token id 128 of tiny is outside its vocabulary of 128"):
            write(tmp_path / "x", [np.array([1, 128])])

    def test_nothing_to_write(self, tmp_path):
        with pytest.raises(DataError, match="no text"):
            write(tmp_path / "x", [[]])


class TestDamage:
    @pytest.mark.parametrize("suffix", [".bin", ".idx"])
    def test_missing(self, prefix, suffix):
        prefix.with_suffix(suffix).unlink()
        with pytest.raises(DataError, match=rf"train\{suffix} is missing; make it with: kit convert data"):
            IndexedTokens(prefix)

    @pytest.mark.parametrize(("suffix", "keep"), [(".bin", -1), (".bin", 0), (".idx", -1), (".idx", 40), (".idx", 10)])
    def test_truncated(self, prefix, suffix, keep):
        path = prefix.with_suffix(suffix)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DataError, match=rf"train\{suffix} has \d+ bytes"):
            IndexedTokens(prefix)

    @pytest.mark.parametrize(
        ("at", "data", "message"),
        [
            (0, b"PNG", "does not start with Megatron's MMIDIDX"),
            (9, struct.pack("<Q", 2), "has version 2"),
            (17, b"\x07", "has dtype code 7, which is not an integer type"),
            (18, struct.pack("<Q", 2**62), "bytes where its header asks for"),
        ],
    )
    def test_foreign_header(self, prefix, at, data, message):
        path = prefix.with_suffix(".idx")
        content = bytearray(path.read_bytes())
        content[at : at + len(data)] = data
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            IndexedTokens(prefix)

    def test_another_pairs_sidecar(self, prefix, tmp_path):
        other = write(tmp_path / "other", [np.arange(50)])
        other.with_suffix(".json").rename(prefix.with_suffix(".json"))
        with pytest.raises(DataError, match="it belongs to another pair"):
            IndexedTokens(prefix)

    def test_damaged_sidecar(self, prefix):
        prefix.with_suffix(".json").write_text("{}")
        with pytest.raises(DataError, match="is not the sidecar"):
            IndexedTokens(prefix)


class TestSamples:
    def test_windows_over_the_stream(self, prefix):
        stream = np.concatenate(tiny.documents())
        samples = GptSamples(IndexedTokens(prefix), 32, tiny.VOCAB_SIZE)
        assert len(samples) == (len(stream) - 1) // 32
        for index in (0, 1, len(samples) - 1):
            inputs, labels = samples[index]
            assert np.array_equal(inputs, stream[index * 32 : index * 32 + 32])
            assert np.array_equal(labels, stream[index * 32 + 1 : index * 32 + 33])

    def test_exactly_one_sample_and_one_token_less(self, tmp_path):
        assert len(GptSamples(IndexedTokens(write(tmp_path / "a", [np.arange(33)])), 32, 128)) == 1
        with pytest.raises(DataError, match="has 32 tokens, and one sample of seq_length=32 takes 33"):
            GptSamples(IndexedTokens(write(tmp_path / "b", [np.arange(32)])), 32, 128)

    def test_ids_beyond_the_model_are_found_before_training(self, prefix):
        with pytest.raises(DataError, match="outside the model's vocabulary of 100"):
            GptSamples(IndexedTokens(prefix), 32, 100)

    def test_without_a_sidecar_they_are_found_when_read(self, tmp_path):
        prefix = write(tmp_path / "train", [np.zeros(64, dtype=int), np.full(64, 120)])
        prefix.with_suffix(".json").unlink()
        samples = GptSamples(IndexedTokens(prefix), 32, 100)
        assert samples[0][0].sum() == 0
        with pytest.raises(DataError, match="token id 120"):
            samples[2]


class TestBatches:
    @pytest.fixture
    def samples(self, prefix):
        return GptSamples(IndexedTokens(prefix), 32, tiny.VOCAB_SIZE)

    @pytest.mark.parametrize("samples_seen", [0, 8, 40])
    def test_a_step_is_the_same_samples_in_the_same_order_on_every_layout(self, samples, samples_seen):
        expected = [samples[order(5, len(samples), samples_seen + k)] for k in range(8)]
        for dp, mbs, accumulation in [c for c in product([1, 2, 4, 8], repeat=3) if np.prod(c) == 8]:
            ranks = [
                training_batches(samples, 5, samples_seen, DataParallelShard(mbs, accumulation, r, dp))
                for r in range(dp)
            ]
            # Micro batch a of all ranks in rank order, then micro batch a + 1: that is the step's order.
            rows = [
                (inputs, labels)
                for a in range(accumulation)
                for rank in ranks
                for inputs, labels in zip(rank[a].input_ids, rank[a].labels, strict=True)
            ]
            assert len(rows) == 8
            for (inputs, labels), (expected_inputs, expected_labels) in zip(rows, expected, strict=True):
                assert np.array_equal(inputs, expected_inputs)
                assert np.array_equal(labels, expected_labels)

    def test_a_smaller_step_of_a_ramp_is_its_samples_once_over_all_ranks(self, samples):
        feeds = [DataLoader(samples, None, DataParallelShard(2, 4, rank, 2), 5, 0) for rank in range(2)]
        found = [row.numpy() for feed in feeds for batch in feed.step(16, 8) for row in batch.input_ids]
        expected = [samples[order(5, len(samples), 16 + k)][0] for k in range(8)]
        assert sorted(row.tobytes() for row in found) == sorted(row.tobytes() for row in expected)

    def test_every_sample_once_an_epoch(self, samples):
        share = DataParallelShard(1, 1, 0, 1)
        rows = [training_batches(samples, 5, k, share)[0].input_ids[0].numpy().tobytes() for k in range(len(samples))]
        assert sorted(rows) == sorted(samples[k][0].tobytes() for k in range(len(samples)))

    @pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (2, 2), (4, 3)])
    @pytest.mark.parametrize("asked", [1, 7, 1000])
    def test_validation_counts_every_sequence_once(self, samples, dp, mbs, asked):
        total = min(asked, len(samples))
        ranks = [validation_batches(samples, asked, DataParallelShard(mbs, 1, rank, dp)) for rank in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        labels = torch.cat([batch.labels for batches in ranks for batch in batches])
        counting = (labels != IGNORE_INDEX).all(dim=1)
        assert counting.sum() == total
        assert (labels[~counting] == IGNORE_INDEX).all()
        found = sorted(row.numpy().tobytes() for row in labels[counting])
        assert found == sorted(samples[k][1].tobytes() for k in range(total))

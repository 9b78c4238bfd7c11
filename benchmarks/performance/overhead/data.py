"""How fast samples come, and how long a set takes to open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import kit
from kit.specs.job import JobSpec
from kit.training.data.fine_tuning_rows import Rows
from kit.training.data.indexed import HEADER, MAGIC, VERSION, IndexedTokens, PairFormat
from kit.training.data.indexed_writer import indexed_writer
from kit.training.data.loader import DataParallelShard, training_batches
from kit.training.data.samples import GptSamples, RowSamples, Samples
from tests.support import small_run

SEQ_LENGTH = 4096
VOCABULARY = 128_256
SEQUENCES = (10**3, 10**5, 10**7)
"""Documents of the sets that are opened."""
SECONDS = 1.0


DATA_TIMES = 20.0
OPENING_TIMES = 3.0
"""The largest set's time over the smallest's: both are milliseconds, and noise of a machine in use is as much."""


def speed(directory: Path) -> Iterator[tuple[bool, str]]:
    """Beside what one H100 takes with a model of a billion parameters, by the planner's prediction."""
    job = JobSpec(seq_length=SEQ_LENGTH, global_batch_size=16)
    needed = kit.plan("llama-3.2-1b", "1xH100", job).predicted.tokens_per_s
    for kind, rate in rates(directory).items():
        times = f"{rate / needed:,.0f} times the {needed:,.0f} tokens/s that an H100 takes"
        yield rate >= DATA_TIMES * needed, f"data, {kind}: {rate:,.0f} tokens/s on one core, {times}"
    found = opening(directory)
    told = ", ".join(f"{count:,} documents {ms:.2f} ms" for count, ms in found)
    yield found[-1][1] <= OPENING_TIMES * found[0][1], f"opening a set: {told}"


def rates(directory: Path) -> dict[str, float]:
    """Tokens a second of text, padded and packed rows; processor time of this thread: a busy machine does not count."""
    text = directory / "text"
    with indexed_writer(text, PairFormat(tokenizer="none", vocab_size=VOCABULARY)) as writer:
        writer.add_document(np.random.default_rng(1).integers(0, VOCABULARY, 8_000_000))  # type: ignore[arg-type]
    chat = directory / "chat"
    generator = np.random.default_rng(2)
    with indexed_writer(chat, PairFormat(tokenizer="none", vocab_size=VOCABULARY, objective="sft")) as writer:
        for _ in range(4000):
            writer.add_row([generator.integers(0, VOCABULARY, n).tolist() for n in generator.integers(50, 800, 2)])
    rows = Rows(IndexedTokens(chat), "sft", SEQ_LENGTH, VOCABULARY)
    kinds: dict[str, Samples] = {
        "pretraining": GptSamples(IndexedTokens(text), SEQ_LENGTH, VOCABULARY),
        "sft, padded": RowSamples(rows, SEQ_LENGTH),
        "sft, packed": RowSamples(rows, SEQ_LENGTH, packing=True),
    }
    return {kind: _rate(samples, bucketed=kind != "pretraining") for kind, samples in kinds.items()}


def _rate(samples: Samples, bucketed: bool) -> float:
    share = DataParallelShard(micro_batch_size=2, gradient_accumulation_steps=8, dp_rank=0, dp_size=1)
    tokens, step = 0, 0
    training_batches(samples, 1, 0, share, bucketed)
    began = time.thread_time()
    while time.thread_time() - began < SECONDS:
        step += 1
        batches = training_batches(samples, 1, step * share.global_batch_size, share, bucketed)
        tokens += sum(int((batch.labels >= 0).sum()) if bucketed else batch.labels.numel() for batch in batches)
    return tokens / (time.thread_time() - began)


def opening(directory: Path) -> list[tuple[int, float]]:
    """(documents, milliseconds to open a set and read its first and last sample), the best of several.

    The tokens are a hole in a file: 80 GB of them take no room.
    """
    found = []
    for count in SEQUENCES:
        prefix = directory / f"set-{count}"
        _write_hollow(prefix, count)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            samples = GptSamples(IndexedTokens(prefix), SEQ_LENGTH, small_run.VOCAB_SIZE)
            samples.read_all([0, len(samples) - 1])
            times.append(time.perf_counter() - began)
        found.append((count, 1000 * min(times)))
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}{suffix}").unlink()
    return found


def _write_hollow(prefix: Path, count: int) -> None:
    """A pair whose tokens are all zero, in Megatron's format: documents of SEQ_LENGTH int16 tokens."""
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * SEQ_LENGTH * count)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, count, count + 1))
        np.full(count, SEQ_LENGTH, "<i4").tofile(file)
        (np.arange(count, dtype="<i8") * 2 * SEQ_LENGTH).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)

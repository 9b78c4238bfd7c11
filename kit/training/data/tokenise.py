"""Tokenises text, chats or pairs into the ``.bin``/``.idx`` pair that every engine reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.errors import DataError
from kit.object_storage import is_address
from kit.specs.job import Objective
from kit.training.data.chat_template import read_chat_template
from kit.training.data.indexed import Sidecar
from kit.training.data.indexed_writer import indexed_writer
from kit.training.data.sources import find_sources
from kit.training.data.tokenize_rows import DocumentTokenizer
from kit.training.progress import progress_bar


@dataclass(frozen=True)
class Tokenised:
    """Counts of written documents, and of truncated and dropped rows for fine-tuning."""

    prefix: str
    sidecar: Sidecar
    cut: int = 0
    """Number of truncated rows."""
    dropped: int = 0
    """Number of dropped rows, in which no token was left to learn."""

    def __str__(self) -> str:
        written = self.sidecar
        if written.objective == "pretrain":
            counts = (
                f"{self.prefix}: {written.num_tokens:,} tokens in {written.num_documents:,} documents, "
                f"largest id {written.max_token_id}"
            )
        else:
            counts = (
                f"{self.prefix}: {written.num_documents:,} rows for {written.objective}, "
                f"{written.num_tokens:,} tokens, longest {written.longest}"
            )
        return (
            counts
            + (f"; {self.cut:,} cut" if self.cut else "")
            + (f"; {self.dropped:,} left out" if self.dropped else "")
        )


def tokenise(
    sources: Sequence[str | Path],
    tokenizer: str | Path,
    out: str | Path,
    *,
    objective: Objective = "pretrain",
    text_key: str = "text",
    seq_length: int | None = None,
    vocab_size: int | None = None,
    chat_template: str | None = None,
) -> Tokenised:
    """Write ``out.bin``, ``out.idx`` and ``out.json``; refuses to overwrite. They are complete or absent: after
    an interruption the same call starts again.

    pretrain: a source is a text file (one document), a ``.jsonl`` or ``.parquet`` file (one document per row, in field
    ``text_key``), or the directory of a Hugging Face data set saved with ``save_to_disk``. Files may be at
    addresses of fsspec, such as ``s3://bucket/part-*.jsonl``. Appends the tokenizer's
    end-of-sequence token to every document, and adds no other special tokens. Skips empty documents.

    sft, seq2seq: a source is a ``.jsonl`` file of rows (``row_segments``). Truncates rows longer than ``seq_length``,
    and drops rows without a target.

    ``chat_template``: for chats, a Jinja file or the name of a template of kit (``plain``); None: the tokenizer's own.
    ``vocab_size`` is the model's; None: read it from the config.json beside the tokenizer, if there is one.
    This process reads and writes; the tokenizer's own threads encode text, on all cores or RAYON_NUM_THREADS of them.

    Raises DataError for a source, tokenizer or template that cannot be read, for chats where there is no template, for
    a tokenizer without an end-of-sequence token or with ids outside the model's vocabulary, for a row of another form,
    for a full disk, and if ``out`` is an address.
    """
    if is_address(str(out)):
        raise DataError(f"--out {out} is an address; write the set to a disk, then copy its .bin, .idx and .json there")
    encoder = DocumentTokenizer(
        str(tokenizer),
        objective=objective,
        text_key=text_key,
        seq_length=seq_length,
        vocab_size=vocab_size,
        chat_template=None if chat_template is None else read_chat_template(chat_template),
    )
    found = [each for source in sources for each in find_sources(str(source))]
    if not found:
        raise DataError("no sources are given; give text, .jsonl or .parquet files, or a saved data set")
    with (
        _threads(),
        progress_bar("text", sum(source.num_bytes for source in found)) as advance,
        indexed_writer(out, encoder.pair) as writer,
    ):
        for source in found:
            for rows in encoder.encode(source, advance):
                writer.add_rows(rows)
    return Tokenised(str(out), writer.sidecar(), encoder.cut, encoder.dropped)


@contextmanager
def _threads() -> Iterator[None]:
    """While entered, tokenizers use their threads, which many turn off because of the warning at forks. This forks
    nothing."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before

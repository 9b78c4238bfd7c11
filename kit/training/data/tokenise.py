"""Tokenises text, chats or pairs into the ``.bin``/``.idx`` pair that every engine reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kit.errors import DataError
from kit.object_storage import is_address
from kit.specs.job import Objective
from kit.training.data.chat_template import read_chat_template
from kit.training.data.encoder import Encoder, Encoding
from kit.training.data.encoding_processes import encoded
from kit.training.data.indexed import Sidecar
from kit.training.data.indexed_writer import TokenBlock
from kit.training.data.pair_upload import PairUpload
from kit.training.data.resume import COMMIT_S, Mark, ResumableWriter
from kit.training.data.sources import BLOCK_BYTES, Block, Source, blocks, find_sources
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
    resumed_documents: int = 0
    """Number of documents that an interrupted process had written."""

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
            + (f"; went on after {self.resumed_documents:,} of an interrupted run" if self.resumed_documents else "")
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
    workers: int | None = None,
    work: str | Path | None = None,
    commit_s: float = COMMIT_S,
) -> Tokenised:
    """Write ``out.bin``, ``out.idx`` and ``out.json``; refuses to overwrite. After an interruption the same call goes
    on where it stopped. The files do not depend on interruptions or ``workers``.

    ``out`` may be an address such as ``s3://bucket/sets/a``: the files are written to the directory ``work`` (None:
    ``a.upload``), uploaded when they are complete, and removed from there.

    pretrain: a source is a text file (one document), a ``.jsonl`` or ``.parquet`` file (one document per row, in field
    ``text_key``), or the directory of a Hugging Face data set saved with ``save_to_disk``. Files may be at
    addresses of fsspec, such as ``s3://bucket/part-*.jsonl``. Appends the tokenizer's
    end-of-sequence token to every document, and adds no other special tokens. Skips empty documents.

    sft, seq2seq: a source is a ``.jsonl`` file of rows (``row_parts``). Truncates rows longer than ``seq_length``, and
    drops rows without a target.

    ``chat_template``: for chats, a Jinja file or the name of a template of kit (``plain``); None: the tokenizer's own.
    ``vocab_size`` is the model's; None: read it from the config.json beside the tokenizer, if there is one.
    ``workers``: number of processes; None: one per core, or fewer for little text. ``commit_s``: seconds between two
    records of the place.

    Raises DataError for a source, tokenizer or template that cannot be read, for chats where there is no template, for
    a tokenizer without an end-of-sequence token or
    with ids outside the model's vocabulary, for a row of another form, for a full disk, and if an interrupted run had
    another tokenizer, source or option.
    """
    upload = PairUpload(str(out), work) if is_address(str(out)) else None
    if upload is None and work is not None:
        raise DataError(f"--work {work} with --out {out}: only a set for object storage is written elsewhere first")
    encoding = Encoding(
        tokenizer=str(tokenizer),
        objective=objective,
        text_key=text_key,
        seq_length=seq_length,
        vocab_size=vocab_size,
        chat_template=None if chat_template is None else read_chat_template(chat_template),
    )
    encoder = Encoder(encoding)
    if upload is not None:
        upload.check()
    found = [each for source in sources for each in find_sources(str(source))]
    if not found:
        raise DataError("no sources are given; give text, .jsonl or .parquet files, or a saved data set")
    made_from = {
        "tokenizer": f"{encoder.pair.tokenizer} ({encoder.fingerprint()})",
        "objective": objective,
        "text_key": text_key,
        "seq_length": seq_length,
        "decoder_start_token_id": encoder.pair.decoder_start_token_id,
        "source": [source.name for source in found],
        **({} if upload is None else {"out": str(out)}),
    }
    writer = ResumableWriter(str(out) if upload is None else upload.prefix, encoder.pair, made_from, found, commit_s)
    try:
        _write_all(writer, encoder, encoding, found, workers)
        sidecar = writer.finish(None if upload is None else upload.run)
    except DataError as error:
        if kept := writer.stop():
            raise DataError(f"{error}; {kept:,} documents are kept: after a remedy the same command goes on") from error
        raise
    except BaseException:
        writer.stop()
        raise
    if upload is not None:
        upload.remove_local()
    written = writer.mark.written
    return Tokenised(str(out), sidecar, written.cut, written.dropped, writer.resumed_documents)


def _write_all(
    writer: ResumableWriter, encoder: Encoder, encoding: Encoding, sources: Sequence[Source], workers: int | None
) -> None:
    remaining = sum(num_bytes for _, _, num_bytes in _rest(sources, writer.mark))
    total = sum(source.num_bytes for source in sources)
    # A process takes seconds to start: it should have several blocks to tokenise.
    count = workers or max(1, min(len(os.sched_getaffinity(0)), remaining // (2 * BLOCK_BYTES)))
    todo = (block for _, block, _ in _rest(sources, writer.mark))
    tokens: Iterator[TokenBlock] = (
        encoded(encoding, todo, count) if count > 1 else (encoder.encode(block) for block in todo)
    )
    with progress_bar("text", total, total - remaining) as advance, closing(tokens):  # type: ignore[type-var]
        for (number, block, num_bytes), text in zip(_rest(sources, writer.mark), tokens, strict=True):
            writer.append(text, number, block.stop)
            advance(num_bytes)


def _rest(sources: Sequence[Source], mark: Mark) -> Iterator[tuple[int, Block, int]]:
    """(number of the source, block, bytes of it) of all blocks from a place on."""
    for number, source in enumerate(sources[mark.source :], mark.source):
        for block, num_bytes in blocks(source, mark.position if number == mark.source else 0):
            yield number, block, num_bytes

"""Tokenises text with a local Hugging Face tokenizer into the ``.bin``/``.idx`` pair that every engine reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from kit.errors import DataError
from kit.training.data.indexed import IndexedWriter, Sidecar

BATCH_DOCUMENTS = 1000
"""Documents per call of the tokenizer, which runs a batch on all cores."""
_TEXT_SUFFIXES = (".txt", ".text", ".md")


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
            return (
                f"{self.prefix}: {written.num_tokens:,} tokens in {written.num_documents:,} documents, "
                f"largest id {written.max_token_id}"
            )
        return (
            f"{self.prefix}: {written.num_documents:,} rows for {written.objective}, "
            f"{written.num_tokens:,} tokens, longest {written.longest}"
            + (f"; {self.cut:,} cut" if self.cut else "")
            + (f"; {self.dropped:,} left out" if self.dropped else "")
        )


def tokenise(
    sources: Sequence[Path], tokenizer: Path, out: Path, *, text_key: str = "text", vocab_size: int | None = None
) -> Tokenised:
    """Write ``out.bin``, ``out.idx`` and ``out.json``; refuses to overwrite.

    A source is a text file (one document), a ``.jsonl`` or ``.parquet`` file (one document per row, in field
    ``text_key``), or the directory of a Hugging Face data set saved with ``save_to_disk``. Appends the tokenizer's
    end-of-sequence token to every document, and adds no other special tokens. Skips empty documents. ``vocab_size`` is
    the model's; None: read it from the config.json beside the tokenizer, if there is one.

    Raises DataError for a source or tokenizer that cannot be read, for a tokenizer without an end-of-sequence token or
    with ids outside the model's vocabulary, and for a full disk.
    """
    loaded, tokenizer_vocab = load_tokenizer(Path(tokenizer), vocab_size)
    eod = loaded.eos_token_id
    if eod is None:
        raise DataError(f"the tokenizer in {tokenizer} has no end-of-sequence token; set eos_token in its config")
    documents = (text for source in sources for text in _documents(Path(source), text_key))
    with IndexedWriter(out, tokenizer=Path(tokenizer).name, vocab_size=tokenizer_vocab) as writer:
        for batch in iter(lambda: list(islice(documents, BATCH_DOCUMENTS)), []):
            for ids in loaded(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
                if ids:
                    writer.add_document([*ids, eod])
    return Tokenised(prefix=str(out), sidecar=writer.sidecar())


def load_tokenizer(directory: Path, vocab_size: int | None = None) -> tuple[Any, int]:
    """(tokenizer, number of its ids). Raises DataError if it cannot be read, or if it has more ids than ``vocab_size``
    (None: the vocabulary of the config.json beside it)."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; give a downloaded model's or tokenizer's")
    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(
            f"{directory} holds no tokenizer that transformers loads ({one_line(error)}); copy it again"
        ) from error
    ids = max(loaded.get_vocab().values()) + 1
    limit = vocab_size if vocab_size is not None else model_config(directory).get("vocab_size")
    if isinstance(limit, int) and ids > limit:
        raise DataError(
            f"the tokenizer in {directory} has ids up to {ids - 1}, and the model's vocabulary ends at "
            f"{limit - 1}; use the model's own tokenizer or enlarge vocab_size"
        )
    return loaded, ids


def model_config(directory: Path) -> dict[str, Any]:
    """Content of the config.json beside a tokenizer; empty if the file is missing or unreadable."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _documents(source: Path, text_key: str) -> Iterator[str]:
    if source.is_dir():
        return _saved_dataset(source, text_key)
    if not source.is_file():
        raise DataError(f"{source} does not exist; give text, .jsonl or .parquet files, or a saved data set")
    if source.suffix in (".jsonl", ".ndjson"):
        return (_text_of(row, text_key, where) for where, row in json_rows(source))
    if source.suffix == ".parquet":
        return _parquet(source, text_key)
    if source.suffix in _TEXT_SUFFIXES:
        return iter([_read_text(source)])
    raise DataError(
        f"{source} has the unknown suffix {source.suffix!r}; use {', '.join(_TEXT_SUFFIXES)}, .jsonl or .parquet"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable as UTF-8 text ({error}); convert it first") from error


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line number, row) of a JSON Lines file; skips blank lines. Raises DataError."""
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not JSON Lines ({error}); one JSON object a line is needed") from error


def _opened(path: Path) -> AbstractContextManager[TextIO]:
    """Open a text file. On a terminal, show a progress bar with the remaining time."""
    if not sys.stderr.isatty():
        return open(path, encoding="utf-8")
    from rich.console import Console
    from rich.progress import open as opened_with_a_bar

    console = Console(stderr=True)
    return opened_with_a_bar(path, "r", encoding="utf-8", description=path.name, console=console, transient=True)


def _parquet(path: Path, text_key: str) -> Iterator[str]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if text_key not in file.schema_arrow.names:
            raise DataError(
                f"{path} has no column {text_key!r}; --text-key takes one of {', '.join(file.schema_arrow.names)}"
            )
        for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=[text_key]):
            for row in batch.to_pylist():
                yield _text_of(row, text_key, str(path))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not readable as Parquet ({one_line(error)}); copy it again") from error


def _saved_dataset(directory: Path, text_key: str) -> Iterator[str]:
    import datasets  # type: ignore[import-untyped]

    try:
        loaded = datasets.load_from_disk(str(directory))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{directory} is not a data set saved with save_to_disk ({one_line(error)}); "
            f"give its directory, or single files"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(str(directory / split) for split in loaded)
        raise DataError(f"{directory} has several splits; give one of {splits}")
    if text_key not in loaded.column_names:
        raise DataError(
            f"{directory} has no column {text_key!r}; --text-key takes one of {', '.join(loaded.column_names)}"
        )
    for row in loaded.select_columns([text_key]):
        yield _text_of(row, text_key, str(directory))


def _text_of(row: Any, text_key: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
        raise DataError(f"{where} has no text in field {text_key!r}; name the field with --text-key")
    return str(row[text_key])


def one_line(error: Exception) -> str:
    """The message of an error on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]

"""Writes ``.bin``/``.idx`` pairs (``indexed``), and the sidecar: all three files, or none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from kit.errors import DataError
from kit.files import complete_file, locked, partial_name, write_text
from kit.training.data.indexed import HEADER, MAGIC, TOKEN_DTYPES, VERSION, PairFormat, Sidecar


@contextmanager
def indexed_writer(prefix: str | Path, pair: PairFormat) -> Iterator[IndexedWriter]:
    """Writes a new pair: a complete one or none.

    While it is written, .PREFIX.bin.partial has its tokens; this process has four bytes for each sequence. .bin gets
    its name last, so a pair without it is not complete: a process that was killed leaves one, and the next one removes
    it. Raises DataError if a file of a pair has this prefix, if another process writes it, if it cannot be written, or
    if it has no documents.
    """
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".json", ".idx")]
    partial = partial_name(files[0])
    with ExitStack() as stack:
        with _writer_errors(prefix):
            _refuse_existing(*files)
            partial.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(partial, wait=False))
            stack.callback(partial.unlink, missing_ok=True)
            _refuse_existing(*files)  # another process may have been at its end
            _remove_incomplete(*files)
            stack.callback(_remove_incomplete, *files)
            writer = IndexedWriter(prefix, pair, stack.enter_context(complete_file(files[0])))
            stack.push(writer.drop)
        yield writer
        with _writer_errors(prefix):
            writer.complete()
            stack.close()


@contextmanager
def _writer_errors(prefix: str | Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise DataError(f"{prefix} is being written by another process; wait for it, or choose another") from None
    except OSError as error:
        raise DataError(f"writing {prefix} failed: {error}; check the free space and the permissions there") from error


def _refuse_existing(data: Path, *others: Path) -> None:
    found = [path for path in (data, *others) if path.exists()]
    killed = partial_name(data).exists() and others[-1].exists() and not data.exists()
    if found and not killed:
        raise DataError(f"{found[0]} exists; choose another prefix or remove it yourself")


def _remove_incomplete(data: Path, *others: Path) -> None:
    """Remove the other files, which were complete, beside a .bin that was not."""
    for path in others if not data.exists() else ():
        path.unlink(missing_ok=True)


class IndexedWriter:
    """Appends documents to a pair that ``indexed_writer`` has opened."""

    def __init__(self, prefix: str | Path, pair: PairFormat, file: IO[bytes]) -> None:
        self._prefix, self._pair, self._bin = prefix, pair, file
        self._lengths = array("i")
        """Length of each sequence; ``~length`` for the last sequence of a document."""
        self._hash = hashlib.sha256()
        self._counts: dict[str, Any] = {"max_token_id": -1, "num_tokens": 0, "num_documents": 0, "longest": 0}

    def drop(self, kind: type | None, *_: object) -> None:
        """Close the file, quietly, if there was an error: what is left to write may not fit on the disk either."""
        if kind is not None:
            with suppress(OSError):
                self._bin.close()

    def add_document(self, tokens: Sequence[int]) -> None:
        """Append one document. ``tokens`` includes the end-of-document token. Drops empty documents."""
        if len(tokens):
            self.add_row([tokens])

    def add_row(self, parts: Sequence[Sequence[int]]) -> None:
        """Append one row: context, target, context, target, … (``fine_tuning_rows``). A part may be empty, but not the
        whole row."""
        self.add_rows([parts])

    def add_rows(self, rows: Sequence[Sequence[Sequence[int]]]) -> None:
        """Append documents, each a list of its sequences. Raises DataError for an id outside the vocabulary."""
        arrays = [np.zeros(0, np.int64)]
        for row in rows:
            arrays += [np.asarray(part, dtype=np.int64) for part in row]
            lengths = [len(part) for part in row]
            self._lengths.extend([*lengths[:-1], ~lengths[-1]])
            if self._pair.objective != "pretrain":
                length = max(lengths) if self._pair.objective == "seq2seq" else sum(lengths)
                self._counts["longest"] = max(self._counts["longest"], length)
        tokens = np.concatenate(arrays)
        low, high = int(tokens.min(initial=0)), int(tokens.max(initial=-1))
        if low < 0 or high >= self._pair.vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} of {self._pair.tokenizer} is outside its vocabulary of "
                f"{self._pair.vocab_size}; use the tokenizer of the model"
            )
        data = tokens.astype(self._pair.dtype).tobytes()
        with _writer_errors(self._prefix):
            self._bin.write(data)
        self._hash.update(data)
        self._counts["max_token_id"] = max(self._counts["max_token_id"], high)
        self._counts["num_tokens"] += len(tokens)
        self._counts["num_documents"] += len(rows)

    def sidecar(self) -> Sidecar:
        """The sidecar of the documents written so far."""
        return Sidecar(**dataclasses.asdict(self._pair), **self._counts, bin_sha256=self._hash.hexdigest())

    def complete(self) -> None:
        """Write the index and the sidecar."""
        if not self._lengths:
            raise DataError(f"nothing to write to {self._prefix}: the sources have no text")
        marked = np.array(self._lengths, dtype="<i4")
        lengths = np.where(marked < 0, ~marked, marked)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype("<i8") * self._pair.dtype.itemsize, out=pointers[1:])
        boundaries = np.concatenate([[0], np.flatnonzero(marked < 0) + 1]).astype("<i8")
        (code,) = (code for code, dtype in TOKEN_DTYPES.items() if dtype == self._pair.dtype.newbyteorder("="))
        header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries))
        with complete_file(Path(f"{self._prefix}.idx")) as index:
            index.writelines((header, lengths.astype("<i4").tobytes(), pointers.tobytes(), boundaries.tobytes()))
        write_text(Path(f"{self._prefix}.json"), json.dumps(dataclasses.asdict(self.sidecar()), indent=2) + "\n")

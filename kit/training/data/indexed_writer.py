"""Writes ``.bin``/``.idx`` pairs (``indexed``) block by block.

While a pair is written, PREFIX.bin.partial has its tokens and PREFIX.lengths.partial the lengths of its sequences. Both
only grow, so an interrupted conversion cuts them to what they had and goes on (``resume``).
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from kit.errors import DataError
from kit.specs.job import Objective
from kit.training.data.indexed import HEADER, MAGIC, TOKEN_DTYPES, VERSION, Sidecar

_UINT16_VOCABULARY = 65500
"""Below this vocabulary size Megatron stores two bytes per token (indexed_dataset.py, DType.optimal_dtype)."""
_READ_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PairFormat:
    """What a sidecar says before there are tokens."""

    tokenizer: str
    vocab_size: int
    objective: Objective = "pretrain"
    decoder_start_token_id: int | None = None
    chat_template: str | None = None

    @property
    def dtype(self) -> np.dtype:
        """A token on disk."""
        return np.dtype(np.uint16 if self.vocab_size < _UINT16_VOCABULARY else np.int32).newbyteorder("<")


@dataclass(frozen=True)
class TokenBlock:
    """Tokenised documents, one after the other."""

    tokens: np.ndarray
    """As on disk."""
    lengths: np.ndarray
    """int32, of each sequence; ``~length`` for the last sequence of a document."""
    cut: int = 0
    dropped: int = 0


def token_block(
    documents: Iterable[Sequence[Sequence[int]]], pair: PairFormat, cut: int = 0, dropped: int = 0
) -> TokenBlock:
    """Documents, each a list of sequences, as one block. Raises DataError for an id outside the vocabulary."""
    arrays, lengths = [np.zeros(0, np.int64)], []
    for document in documents:
        arrays += [np.asarray(part, dtype=np.int64) for part in document]
        lengths += [len(part) for part in document]
        lengths[-1] = ~lengths[-1]
    tokens = np.concatenate(arrays)
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, -1)
    if low < 0 or high >= pair.vocab_size:
        raise DataError(
            f"token id {high if high >= pair.vocab_size else low} of {pair.tokenizer} is outside its vocabulary "
            f"of {pair.vocab_size}; use the tokenizer of the model"
        )
    return TokenBlock(tokens.astype(pair.dtype), np.array(lengths, dtype="<i4"), cut, dropped)


@dataclass(frozen=True)
class Written:
    """Counts of what a pair has so far."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_documents: int = 0
    max_token_id: int = -1
    longest: int = 0
    cut: int = 0
    """Number of truncated rows."""
    dropped: int = 0
    """Number of dropped rows, in which no token was left to learn."""

    def plus(self, block: TokenBlock, objective: Objective) -> Written:
        """The counts after a block."""
        ends = block.lengths < 0
        lengths = np.where(ends, ~block.lengths, block.lengths)
        longest = 0
        if len(lengths) and objective != "pretrain":
            starts = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
            longest = int((lengths if objective == "seq2seq" else np.add.reduceat(lengths, starts)).max())
        return Written(
            self.num_tokens + len(block.tokens),
            self.num_sequences + len(lengths),
            self.num_documents + int(ends.sum()),
            max(self.max_token_id, int(block.tokens.max()) if len(block.tokens) else -1),
            max(self.longest, longest),
            self.cut + block.cut,
            self.dropped + block.dropped,
        )


class PairWriter:
    """The growing files of a pair. Raises DataError if another process writes them, or they have less than
    ``written``, or other tokens than those of ``bin_sha256``."""

    def __init__(self, prefix: str, pair: PairFormat, written: Written | None = None, bin_sha256: str = "") -> None:
        self.prefix, self.pair, self.written = prefix, pair, written or Written()
        self._hash = hashlib.sha256()
        mode = "wb" if written is None else "r+b"
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            # Nothing is truncated before the lock is held.
            self._bin: IO[bytes] = open(self._path(".bin.partial"), "r+b" if written else "ab")  # noqa: SIM115
            self._lock()
            self._lengths: IO[bytes] = open(self._path(".lengths.partial"), mode)  # noqa: SIM115
            try:
                self._cut(bin_sha256)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise self.failed(error) from error

    def _path(self, suffix: str) -> Path:
        return Path(self.prefix + suffix)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._bin, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bin.close()
            raise DataError(
                f"{self.prefix}.bin.partial is being written by another process; wait for it, or choose another prefix"
            ) from None
        except OSError:
            pass  # some shared file systems have no locks

    def _cut(self, bin_sha256: str) -> None:
        """Cut the files to what was written, and read the tokens' hash again."""
        num_bytes = self.written.num_tokens * self.pair.dtype.itemsize
        for file, needed in ((self._bin, num_bytes), (self._lengths, 4 * self.written.num_sequences)):
            found = os.fstat(file.fileno()).st_size
            if found < needed:
                raise DataError(
                    f"{file.name} has {found} bytes where {needed} were written; remove {self.prefix}.*.partial to "
                    "begin anew"
                )
            file.truncate(needed)
        if num_bytes:
            self._bin.seek(0)
            while part := self._bin.read(_READ_BYTES):
                self._hash.update(part)
            if self._hash.hexdigest() != bin_sha256:
                raise DataError(
                    f"{self._bin.name} has other tokens than were written; remove {self.prefix}.*.partial to begin anew"
                )
        self._lengths.seek(0, os.SEEK_END)

    def append(self, block: TokenBlock) -> None:
        """Append the documents of a block."""
        data = block.tokens.tobytes()
        try:
            self._bin.write(data)
            self._lengths.write(block.lengths.tobytes())
        except OSError as error:
            raise self.failed(error) from error
        self._hash.update(data)
        self.written = self.written.plus(block, self.pair.objective)

    def bin_sha256(self) -> str:
        """Hash of the tokens so far."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Flush the files to the disk."""
        try:
            for file in (self._bin, self._lengths):
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self.failed(error) from error

    def sidecar(self) -> Sidecar:
        """The sidecar of the documents written so far."""
        return Sidecar(
            **dataclasses.asdict(self.pair),
            max_token_id=self.written.max_token_id,
            num_tokens=self.written.num_tokens,
            num_documents=self.written.num_documents,
            bin_sha256=self.bin_sha256(),
            longest=self.written.longest,
        )

    def complete(self) -> Sidecar:
        """Write the index and the sidecar, and give all three files their names; .bin is the last. Raises DataError if
        there are no documents."""
        if not self.written.num_sequences:
            raise DataError(f"nothing to write to {self.prefix}: the sources have no text")
        self.sync()
        try:
            marked = np.fromfile(self._path(".lengths.partial"), dtype="<i4")
            lengths = np.where(marked < 0, ~marked, marked).astype("<i4")
            pointers = np.zeros(len(lengths), dtype="<i8")
            np.cumsum(lengths[:-1].astype("<i8") * self.pair.dtype.itemsize, out=pointers[1:])
            boundaries = np.concatenate([[0], np.flatnonzero(marked < 0) + 1]).astype("<i8")
            (code,) = (code for code, dtype in TOKEN_DTYPES.items() if dtype == self.pair.dtype.newbyteorder("="))
            header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries))
            self._write(".idx", header, lengths.tobytes(), pointers.tobytes(), boundaries.tobytes())
            self._write(".json", json.dumps(dataclasses.asdict(self.sidecar()), indent=2).encode(), b"\n")
            self._path(".bin.partial").rename(self._path(".bin"))
        except OSError as error:
            raise self.failed(error) from error
        return self.sidecar()

    def _write(self, suffix: str, *parts: bytes) -> None:
        partial = self._path(f"{suffix}.partial")
        with open(partial, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._path(suffix))

    def close(self, remove: bool = False) -> None:
        """Close the files. ``remove``: delete all that is not complete."""
        for file in (self._bin, self._lengths):
            with suppress(OSError):  # what a full disk could not take
                file.close()
        if remove:
            for path in (f"{self.prefix}{suffix}.partial" for suffix in (".bin", ".lengths", ".idx", ".json")):
                Path(path).unlink(missing_ok=True)

    def failed(self, error: OSError) -> DataError:
        """What to say of an error of the file system."""
        return DataError(f"writing {self.prefix} failed: {error}; check the free space and the permissions there")


def reopen_complete(prefix: str) -> None:
    """Undo ``PairWriter.complete`` as far as it came, if its process was interrupted."""
    if os.path.exists(f"{prefix}.bin"):
        os.rename(f"{prefix}.bin", f"{prefix}.bin.partial")
    for suffix in (".idx", ".json"):
        Path(prefix + suffix).unlink(missing_ok=True)


def refuse_existing_pair(prefix: str) -> None:
    """Raises DataError if a file of a complete pair has this prefix."""
    for suffix in (".bin", ".idx", ".json"):
        if os.path.exists(prefix + suffix):
            raise DataError(f"{prefix}{suffix} exists; choose another prefix or remove it yourself")


class IndexedWriter:
    """Context manager that writes a new ``.bin``/``.idx`` pair one document at a time. Leaves a complete pair or none.

    Raises DataError if a file with this prefix exists already or cannot be written.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        tokenizer: str,
        vocab_size: int,
        objective: Objective = "pretrain",
        decoder_start_token_id: int | None = None,
    ) -> None:
        refuse_existing_pair(str(prefix))
        self._prefix = str(prefix)
        self._pair = PairFormat(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            objective=objective,
            decoder_start_token_id=decoder_start_token_id,
        )

    def __enter__(self) -> IndexedWriter:
        self._files = PairWriter(self._prefix, self._pair)
        return self

    def add_document(self, tokens: Sequence[int]) -> None:
        """Append one document. ``tokens`` includes the end-of-document token. Drops empty documents."""
        if len(tokens):
            self.add_row([tokens])

    def add_row(self, parts: Sequence[Sequence[int]]) -> None:
        """Append one row: context, target, context, target, … (``fine_tuning_rows``). A part may be empty, but not the
        whole row."""
        self._files.append(token_block([parts], self._pair))

    def sidecar(self) -> Sidecar:
        """The sidecar of the documents written so far."""
        return self._files.sidecar()

    def __exit__(self, exception_type: type | None, *_: object) -> None:
        try:
            if exception_type is None:
                self._files.complete()
        finally:
            self._files.close(remove=True)

"""Tokenised documents on disk: the ``.bin``/``.idx`` pair of Megatron-LM, and kit's sidecar.

PREFIX.bin    the tokens of all documents, concatenated
PREFIX.idx    magic, version, dtype code, counts; then per sequence its length and byte offset, and the
              sequence index at which each document ends (megatron/core/datasets/indexed_dataset.py)
PREFIX.json   what the index lacks: tokenizer, its vocabulary, largest token id, counts, hashes

A document of text is one sequence. A row for fine-tuning is a document of several sequences: context, target, context,
target, … (``fine_tuning_rows``). So no file of masks is needed, and Megatron's reader accepts both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kit.errors import DataError
from kit.specs.job import Objective

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document boundaries."""
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Dtype code in the index → integer dtype. Codes 6 and 7 are floats, which cannot be tokens."""
_UINT16_VOCABULARY = 65500
"""Below this vocabulary size Megatron stores two bytes per token (indexed_dataset.py, DType.optimal_dtype)."""


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Content of ``PREFIX.json``."""

    tokenizer: str
    vocab_size: int
    """Largest id of the tokenizer plus one."""
    max_token_id: int
    """Largest token id in the data."""
    num_tokens: int
    num_documents: int
    bin_sha256: str
    objective: Objective = "pretrain"
    """Kind of documents: text (pretrain), rows for sft, or (source, target) for seq2seq."""
    longest: int = 0
    """Tokens of the longest row; for seq2seq, of the longest source or target; 0 for text."""
    decoder_start_token_id: int | None = None
    """First input of the decoder, for seq2seq."""


class IndexedTokens:
    """The tokens of a ``.bin``/``.idx`` pair as one memory-mapped stream, which opens equally fast at any size.

    Raises DataError if a file is missing or not of this format, or if sizes disagree with the index (truncation).
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        bin_path, idx_path = _paths(self.prefix)
        self.sidecar = _read_sidecar(self.prefix)
        dtype, num_sequences, num_boundaries = _read_header(idx_path)
        lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * num_sequences
        documents_at = pointers_at + 8 * num_sequences
        expected_bytes = documents_at + 8 * num_boundaries
        # A multimodal index has one more byte per sequence; its tokens are stored in the same way.
        if (size := idx_path.stat().st_size) not in (expected_bytes, expected_bytes + num_sequences):
            raise DataError(f"{idx_path} has {size} bytes where its header asks for {expected_bytes}; tokenise again")
        if num_sequences == 0:
            raise DataError(f"{idx_path} has no documents; tokenise some text")
        index = np.memmap(idx_path, mode="r", dtype=np.uint8)
        self.sequence_lengths = np.frombuffer(index, "<i4", num_sequences, lengths_at)
        self.document_indices = np.frombuffer(index, "<i8", num_boundaries, documents_at)
        last_pointer = int(np.frombuffer(index, "<i8", num_sequences, pointers_at)[-1])
        end = last_pointer + int(self.sequence_lengths[-1]) * dtype.itemsize
        if (size := bin_path.stat().st_size) != end:
            raise DataError(
                f"{bin_path} has {size} bytes where its index asks for {end}; copy it again or tokenise again"
            )
        if end == 0:
            raise DataError(f"{bin_path} has no tokens; tokenise some text")
        # A plain array, because slices of a memmap are memmaps, and each costs as much as reading thousands of tokens.
        self._tokens = np.memmap(bin_path, mode="r", dtype=dtype).view(np.ndarray)
        if self.sidecar is not None and self.sidecar.num_tokens != len(self._tokens):
            raise DataError(
                f"{self.prefix}.json says {self.sidecar.num_tokens} tokens where {self.prefix}.bin has "
                f"{len(self._tokens)}; it belongs to another pair: tokenise again"
            )

    def __len__(self) -> int:
        """Total number of tokens."""
        return len(self._tokens)

    def check_token_id(self, token_id: int, vocab_size: int) -> None:
        """Raises DataError if the id is not in the model's vocabulary."""
        if token_id >= vocab_size:
            raise DataError(
                f"token id {token_id} in {self.prefix} is outside the model's vocabulary of {vocab_size}; "
                "tokenise with the model's own tokenizer"
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy tokens ``start`` to ``start + count`` of the stream, as int64."""
        return self._tokens[start : start + count].astype(np.int64)


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
        self._prefix = str(prefix)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._objective: Objective = objective
        self._decoder_start = decoder_start_token_id
        self._boundaries, self._longest = [0], 0
        self._dtype = np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)
        self._lengths: list[int] = []
        self._max_token_id = -1
        self._hash = hashlib.sha256()
        for suffix in (".bin", ".idx", ".json"):
            if os.path.exists(self._prefix + suffix):
                raise DataError(f"{self._prefix}{suffix} exists; choose another prefix or remove it yourself")
        self._partial = {suffix: Path(f"{self._prefix}{suffix}.partial") for suffix in (".bin", ".idx", ".json")}

    def __enter__(self) -> IndexedWriter:
        try:
            Path(self._prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._partial[".bin"], "wb")
        except OSError as error:
            raise self._failed(error) from error
        return self

    def add_document(self, tokens: Sequence[int]) -> None:
        """Append one document. ``tokens`` includes the end-of-document token. Drops empty documents."""
        if len(tokens):
            self._append(tokens)
            self._boundaries.append(len(self._lengths))

    def add_row(self, parts: Sequence[Sequence[int]]) -> None:
        """Append one row: context, target, context, target, … (``fine_tuning_rows``). A part may be empty, but not the
        whole row."""
        for part in parts:
            self._append(part)
        self._boundaries.append(len(self._lengths))
        sizes = [len(part) for part in parts]
        self._longest = max(self._longest, max(sizes) if self._objective == "seq2seq" else sum(sizes))

    def _append(self, tokens: Sequence[int]) -> None:
        array = np.asarray(tokens, dtype=np.int64)
        low, high = (int(array.min()), int(array.max())) if len(array) else (0, -1)
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"token id {high if high >= self._vocab_size else low} of {self._tokenizer} is outside its vocabulary "
                f"of {self._vocab_size}; use the tokenizer of the model"
            )
        data = array.astype(self._dtype.newbyteorder("<")).tobytes()
        try:
            self._bin.write(data)
        except OSError as error:
            raise self._failed(error) from error
        self._hash.update(data)
        self._lengths.append(len(array))
        self._max_token_id = max(self._max_token_id, high)

    def sidecar(self) -> Sidecar:
        """The sidecar of the documents written so far."""
        return Sidecar(
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            max_token_id=self._max_token_id,
            num_tokens=sum(self._lengths),
            num_documents=len(self._boundaries) - 1,
            bin_sha256=self._hash.hexdigest(),
            objective=self._objective,
            longest=self._longest,
            decoder_start_token_id=self._decoder_start,
        )

    def __exit__(self, exception_type: type | None, *_: object) -> None:
        try:
            self._bin.close()
            if exception_type is None:
                self._finish()
        except OSError as error:
            raise self._failed(error) from error
        finally:
            for path in self._partial.values():
                path.unlink(missing_ok=True)

    def _finish(self) -> None:
        if not self._lengths:
            raise DataError(f"nothing to write to {self._prefix}: the sources have no text")
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype("<i8") * self._dtype.itemsize, out=pointers[1:])
        (code,) = (code for code, dtype in _DTYPES.items() if dtype == self._dtype)
        with open(self._partial[".idx"], "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._boundaries)))
            file.write(lengths.tobytes())
            file.write(pointers.tobytes())
            file.write(np.array(self._boundaries, dtype="<i8").tobytes())
        self._partial[".json"].write_text(json.dumps(dataclasses.asdict(self.sidecar()), indent=2) + "\n")
        for suffix, path in self._partial.items():
            path.rename(self._prefix + suffix)

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"writing {self._prefix} failed: {error}; check the free space and the permissions there")


def _paths(prefix: str) -> tuple[Path, Path]:
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise DataError(
                f"{prefix}{suffix} is missing; make it with: kit convert data TEXT --tokenizer DIR --out {prefix}"
            )
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{path} has {len(header)} bytes, less than a header; tokenise again")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    for wrong, why in (
        (magic != MAGIC, "does not start with Megatron's MMIDIDX; give the prefix of a .bin/.idx pair"),
        (version != VERSION, f"has version {version}, this reader knows {VERSION}; tokenise again"),
        (code not in _DTYPES, f"has dtype code {code}, which is not an integer type; tokenise again"),
    ):
        if wrong:
            raise DataError(f"{path} {why}")
    return np.dtype(_DTYPES[code]).newbyteorder("<"), num_sequences, num_boundaries


def _read_sidecar(prefix: str) -> Sidecar | None:
    path = Path(prefix + ".json")
    if not path.is_file():
        return None
    try:
        return Sidecar(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not the sidecar of a .bin/.idx pair ({error}); move it away or tokenise again"
        ) from error

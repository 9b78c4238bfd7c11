"""Tokenised documents on disk: the ``.bin``/``.idx`` pair of Megatron-LM, and kit's sidecar.

PREFIX.bin    the tokens of all documents, concatenated
PREFIX.idx    magic, version, dtype code, counts; then per sequence its length and byte offset, and the
              sequence index at which each document ends (megatron/core/datasets/indexed_dataset.py)
PREFIX.json   what the index lacks: tokenizer, its vocabulary, largest token id, counts, hashes

A document of text is one sequence. A row for fine-tuning is a document of several sequences: context, target, context,
target, … (``fine_tuning_rows``). So no file of masks is needed, and Megatron's reader accepts both.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kit.errors import DataError
from kit.specs.job import Objective
from kit.specs.text import refuse
from kit.training.data.indexed_files import DiskPair, Ranges, RemotePair, open_pair

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document boundaries."""
TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Dtype code in the index → integer dtype. Codes 6 and 7 are floats, which cannot be tokens."""


_UINT16_VOCABULARY = 65500
"""Below this vocabulary size Megatron stores two bytes per token (indexed_dataset.py, DType.optimal_dtype)."""


@dataclass(frozen=True, kw_only=True)
class PairFormat:
    """What a sidecar says before there are tokens."""

    tokenizer: str
    vocab_size: int
    """Largest id of the tokenizer plus one."""
    objective: Objective = "pretrain"
    """Kind of documents: text (pretrain), rows for sft, or (source, target) for seq2seq."""
    decoder_start_token_id: int | None = None
    """First input of the decoder, for seq2seq."""
    chat_template: str | None = None
    """Jinja text by which chats became tokens, for sft; None if there was none."""

    @property
    def dtype(self) -> np.dtype:
        """A token on disk."""
        return np.dtype(np.uint16 if self.vocab_size < _UINT16_VOCABULARY else np.int32).newbyteorder("<")


@dataclass(frozen=True, kw_only=True)
class Sidecar(PairFormat):
    """Content of ``PREFIX.json``."""

    max_token_id: int
    """Largest token id in the data."""
    num_tokens: int
    num_documents: int
    bin_sha256: str
    longest: int = 0
    """Tokens of the longest row; for seq2seq, of the longest source or target; 0 for text."""


class IndexedTokens:
    """The tokens of a ``.bin``/``.idx`` pair as one stream, which opens equally fast at any size. On a disk it is
    mapped into memory; of a prefix such as ``s3://bucket/sets/a`` what is asked for is read (``indexed_files``).

    Raises DataError if a file is missing or not of this format, or if sizes disagree with the index (truncation).
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        pair = open_pair(self.prefix)
        bin_path, idx_path = f"{self.prefix}.bin", f"{self.prefix}.idx"
        self.sidecar = _read_sidecar(self.prefix, pair)
        dtype, num_sequences, num_boundaries = _read_header(pair.index, idx_path)
        lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * num_sequences
        documents_at = pointers_at + 8 * num_sequences
        expected_bytes = documents_at + 8 * num_boundaries
        # A multimodal index has one more byte per sequence; its tokens are stored in the same way.
        if (size := pair.index.stat().st_size) not in (expected_bytes, expected_bytes + num_sequences):
            raise DataError(f"{idx_path} has {size} bytes where its header asks for {expected_bytes}; tokenise again")
        if num_sequences == 0:
            raise DataError(f"{idx_path} has no documents; tokenise some text")
        index = np.memmap(pair.index, mode="r", dtype=np.uint8)
        self.sequence_lengths = np.frombuffer(index, "<i4", num_sequences, lengths_at)
        self.document_indices = np.frombuffer(index, "<i8", num_boundaries, documents_at)
        last_pointer = int(np.frombuffer(index, "<i8", num_sequences, pointers_at)[-1])
        end = last_pointer + int(self.sequence_lengths[-1]) * dtype.itemsize
        if pair.bin_bytes != end:
            raise DataError(
                f"{bin_path} has {pair.bin_bytes} bytes where its index asks for {end}; copy it again or tokenise again"
            )
        if end == 0:
            raise DataError(f"{bin_path} has no tokens; tokenise some text")
        self._read, self._length = pair.reader(dtype), end // dtype.itemsize
        if self.sidecar is not None and self.sidecar.num_tokens != len(self):
            raise DataError(
                f"{self.prefix}.json says {self.sidecar.num_tokens} tokens where {self.prefix}.bin has "
                f"{len(self)}; it belongs to another pair: tokenise again"
            )

    def __len__(self) -> int:
        """Total number of tokens."""
        return self._length

    def check_token_id(self, token_id: int, vocab_size: int) -> None:
        """Raises DataError if the id is not in the model's vocabulary."""
        if token_id >= vocab_size:
            raise DataError(
                f"token id {token_id} in {self.prefix} is outside the model's vocabulary of {vocab_size}; "
                "tokenise with the model's own tokenizer"
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy tokens ``start`` to ``start + count`` of the stream, as int64."""
        return self.read_all([(start, count)])[0]

    def read_all(self, ranges: Ranges) -> list[np.ndarray]:
        """Copy the tokens of several ranges, as int64. From an address all are read at once."""
        return [tokens.astype(np.int64) for tokens in self._read(ranges)]


def _read_header(path: Path, name: str) -> tuple[np.dtype, int, int]:
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{name} has {len(header)} bytes, less than a header; tokenise again")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    reasons = {
        f"{name} does not start with Megatron's MMIDIDX; give the prefix of a .bin/.idx pair": magic != MAGIC,
        f"{name} has version {version}, this reader knows {VERSION}; tokenise again": version != VERSION,
        f"{name} has dtype code {code}, which is not an integer type; tokenise again": code not in TOKEN_DTYPES,
    }
    refuse(reasons, DataError)
    return np.dtype(TOKEN_DTYPES[code]).newbyteorder("<"), num_sequences, num_boundaries


def _read_sidecar(prefix: str, pair: DiskPair | RemotePair) -> Sidecar | None:
    try:
        content = pair.sidecar()
        return None if content is None else Sidecar(**json.loads(content))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{prefix}.json is not the sidecar of a .bin/.idx pair ({error}); move it away or tokenise again"
        ) from error

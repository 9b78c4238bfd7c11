"""Rows for fine-tuning: documents in which contexts, which the model reads, and targets, which it learns, alternate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kit.engines.protocol import IGNORE_INDEX
from kit.errors import DataError
from kit.specs.job import Objective
from kit.training.data.indexed import IndexedTokens


@dataclass(frozen=True)
class Row:
    """One row, ready for a decoder; int64, (length,) each."""

    inputs: np.ndarray
    labels: np.ndarray
    """Already shifted. ``IGNORE_INDEX`` if the next token is context."""
    source: np.ndarray | None = None
    """The encoder's input (seq2seq)."""

    def __len__(self) -> int:
        return len(self.inputs)


class Rows:
    """The rows of a ``.bin``/``.idx`` pair.

    sft: labels are the tokens of targets, except the first token of a row. seq2seq: the encoder reads the context; the
    decoder gets its start token, and its labels are the whole target. Raises DataError if the pair was written for
    another objective, a row is longer than ``seq_length``, or a token id is not in the model's vocabulary.
    """

    def __init__(self, tokens: IndexedTokens, objective: Objective, seq_length: int, vocab_size: int) -> None:
        sidecar = tokens.sidecar
        found = "pretrain" if sidecar is None else sidecar.objective
        if sidecar is None or found != objective:
            raise DataError(
                f"{tokens.prefix} was written for objective={found} and the job has {objective}; write it again with: "
                f"kit convert data ROWS.jsonl --objective {objective}"
            )
        tokens.check_token_id(sidecar.max_token_id, vocab_size)
        self._tokens, self._objective = tokens, objective
        self._start = sidecar.decoder_start_token_id
        self._bounds = tokens.document_indices.astype(np.int64)
        self._ends = np.cumsum(tokens.sequence_lengths, dtype=np.int64)
        before = np.concatenate([np.zeros(1, np.int64), self._ends])
        whole = before[self._bounds[1:]] - before[self._bounds[:-1]]
        if objective == "sft":
            self.lengths = whole - 1
            """Number of input tokens of every row; for seq2seq, of the decoder."""
            self.source_lengths = np.zeros_like(self.lengths)
        else:
            self.source_lengths = tokens.sequence_lengths[::2].astype(np.int64)
            self.lengths = tokens.sequence_lengths[1::2].astype(np.int64)
        longest = int(max(self.lengths.max(), self.source_lengths.max()))
        if longest > seq_length:
            raise DataError(
                f"{tokens.prefix} has a row of {longest} tokens and job.seq_length is {seq_length}; raise it, or cut "
                f"the rows: kit convert data ROWS.jsonl --seq-length {seq_length}"
            )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows, as ``kit convert data`` counts them."""
        return len(self._tokens)

    def read_all(self, indices: Sequence[int]) -> list[Row]:
        """Read rows, all at once."""
        found = self._tokens.read_all([self._range(index) for index in indices])
        return [self._row(index, tokens) for index, tokens in zip(indices, found, strict=True)]

    def _range(self, index: int) -> tuple[int, int]:
        first, last = int(self._bounds[index]), int(self._bounds[index + 1])
        lengths = self._tokens.sequence_lengths[first:last]
        return int(self._ends[first]) - int(lengths[0]), int(lengths.sum())

    def _row(self, index: int, tokens: np.ndarray) -> Row:
        lengths = self._tokens.sequence_lengths[self._bounds[index] : self._bounds[index + 1]]
        if self._objective == "seq2seq":
            source, target = tokens[: lengths[0]], tokens[lengths[0] :]
            return Row(inputs=np.concatenate([[self._start], target[:-1]]), labels=target, source=source)
        counts = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        return Row(inputs=tokens[:-1], labels=np.where(counts, tokens, IGNORE_INDEX)[1:])

"""The samples of an epoch: windows of text, rows, or packs of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from kit.errors import DataError
from kit.training.data.fine_tuning_rows import Row, Rows
from kit.training.data.indexed import IndexedTokens
from kit.training.data.shuffle import permuted_index

MULTIPLE = 8
"""Lengths are rounded up to a multiple of this: in 16 bits tensor cores are fastest at multiples of 8."""


class TrainingSamples(ABC):
    """Samples by their position in an endless sequence, and micro batches of them."""

    @abstractmethod
    def drawn(self, seed: int, position: int) -> int:
        """Number of the sample at ``position``."""

    @abstractmethod
    def length(self, index: int) -> int:
        """Number of tokens of a sample. Does not read the sample."""

    @abstractmethod
    def read_all(self, indices: Sequence[int | None]) -> list[Any]:
        """Samples for ``collate``, read at once. None stands for a sample with masked labels only."""

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> MicroBatch:
        """Micro batch of samples that ``read_all`` returned."""

    def micro_batches(self, batches: Sequence[Sequence[int | None]]) -> list[MicroBatch]:
        """Micro batches of these samples, which are read at once."""
        samples = iter(self.read_all([index for batch in batches for index in batch]))
        return [self.collate(list(islice(samples, len(batch)))) for batch in batches]


class Samples(TrainingSamples):
    """A known number of samples."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples in an epoch."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens of an epoch, without padding."""

    def drawn(self, seed: int, position: int) -> int:
        """Sample at ``position`` of an endless sequence of epochs."""
        return permuted_index(seed, len(self), position)


class GptSamples(Samples):
    """Sample i reads tokens i·s to i·s + s + 1, with s the sequence length: the first s are inputs, the last s labels.

    Attention is not reset between documents, as by default in Megatron-LM. Raises DataError if there is less than one
    sample, if the pair has rows for fine-tuning, or if the sidecar's largest token id is not in the model's vocabulary.
    """

    def __init__(self, tokens: IndexedTokens, seq_length: int, vocab_size: int) -> None:
        self._tokens, self._seq_length, self._vocab_size = tokens, seq_length, vocab_size
        self._length = (len(tokens) - 1) // seq_length
        if tokens.sidecar is not None and tokens.sidecar.objective != "pretrain":
            raise DataError(
                f"{tokens.prefix} was written for objective={tokens.sidecar.objective} and the job has pretrain; "
                f"use job.objective={tokens.sidecar.objective}, or convert text"
            )
        if self._length < 1:
            raise DataError(
                f"{tokens.prefix} has {len(tokens)} tokens, and one sample of seq_length={seq_length} takes "
                f"{seq_length + 1}; add data or shorten the sequence"
            )
        if tokens.sidecar is not None:
            tokens.check_token_id(tokens.sidecar.max_token_id, vocab_size)

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return self._length

    @property
    def num_tokens(self) -> int:
        """Number of input tokens."""
        return self._length * self._seq_length

    def length(self, index: int) -> int:
        """The sequence length, for all samples."""
        return self._seq_length

    def read_all(self, indices: Sequence[int | None]) -> list[tuple[np.ndarray, bool]]:
        """(window of the token stream, whether its labels count) of each."""
        windows = self._tokens.read_all([((k or 0) * self._seq_length, self._seq_length + 1) for k in indices])
        return [(window, index is not None) for window, index in zip(windows, indices, strict=True)]

    def collate(self, samples: Sequence[tuple[np.ndarray, bool]]) -> MicroBatch:
        """Micro batch of windows."""
        windows = np.stack([window for window, _ in samples])
        # Without a sidecar the ids are not checked yet. An id outside the vocabulary would end in a device-side assert.
        self._tokens.check_token_id(int(windows.max()), self._vocab_size)
        batch = of_windows(windows)
        batch.labels[[not counts for _, counts in samples]] = IGNORE_INDEX
        return batch


def of_windows(windows: np.ndarray) -> MicroBatch:
    """Micro batch of windows of text, int64, (samples, sequence length + 1)."""
    inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
    return MicroBatch(input_ids=torch.from_numpy(inputs), labels=torch.from_numpy(labels))


class RowSamples(Samples):
    """A sample is one row, padded to the longest row of its micro batch; with ``packing`` several rows that together
    fit into ``seq_length`` and do not attend to each other (``packed``)."""

    def __init__(self, rows: Rows, seq_length: int, multiple: int = MULTIPLE, packing: bool = False) -> None:
        """``multiple``: pad every micro batch to a multiple of this; to ``seq_length``, where all need one length."""
        self._rows, self._seq_length, self._multiple = rows, seq_length, multiple
        self.packs = packs(rows.lengths.tolist(), seq_length) if packing else None
        """Numbers of the rows of each sample; None: a sample is the row of its number."""
        longer = np.maximum(rows.lengths, rows.source_lengths)
        self._lengths = longer if self.packs is None else np.array([longer[pack].sum() for pack in self.packs])

    def __len__(self) -> int:
        """Number of rows or packs."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the rows."""
        return self._rows.num_tokens

    def length(self, index: int) -> int:
        """Number of tokens of the rows; for seq2seq, of the longer of source and target."""
        return int(self._lengths[index])

    def read_all(self, indices: Sequence[int | None]) -> list[list[Row]]:
        """The rows of each sample."""
        numbers = [[k or 0] if k is None or self.packs is None else self.packs[k] for k in indices]
        rows = iter(self._rows.read_all([row for pack in numbers for row in pack]))
        found = [list(islice(rows, len(pack))) for pack in numbers]
        return [list(map(_masked, pack)) if k is None else pack for pack, k in zip(found, indices, strict=True)]

    def collate(self, samples: Sequence[Sequence[Row]]) -> MicroBatch:
        """Micro batch of padded or packed rows."""
        if self.packs is None:
            return padded([row for (row,) in samples], self._seq_length, self._multiple)
        return packed(samples, self._seq_length, self._multiple)


def _masked(row: Row) -> Row:
    return Row(inputs=row.inputs, labels=np.full_like(row.labels, IGNORE_INDEX), source=row.source)


_PADDING_ID = 0
"""Token id of padding. Any id would do: no other token attends to padding, and its labels are masked."""
_PADDING = -1
"""Document number of padding in ``sequence_ids``."""


def padded(rows: Sequence[Row], longest: int, multiple: int = MULTIPLE) -> MicroBatch:
    """Micro batch with one row per sequence. ``longest``: the job's seq_length, the largest length; ``multiple``: pad
    to a multiple of this, if that is not longer."""
    text = packed([[row] for row in rows], longest, multiple)
    sources = [row.source for row in rows if row.source is not None]
    if not sources:
        return MicroBatch(text.input_ids, text.labels, padding=text.padding, squared_lengths=text.squared_lengths)
    length = _length([len(source) for source in sources], longest, multiple)
    source_ids, mask = _blank(len(rows), length, _PADDING_ID), _blank(len(rows), length, 0)
    for place, source in enumerate(sources):
        source_ids[place, : len(source)], mask[place, : len(source)] = source, 1
    squares = text.squared_lengths or 0
    return MicroBatch(
        text.input_ids,
        text.labels,
        source_ids=torch.from_numpy(source_ids),
        source_mask=torch.from_numpy(mask),
        padding=text.padding + int(mask.size - mask.sum()),
        squared_lengths=squares + sum(len(source) ** 2 for source in sources),
    )


def packed(packs: Sequence[Sequence[Row]], longest: int, multiple: int = MULTIPLE) -> MicroBatch:
    """Micro batch with several rows per sequence. Positions restart in each row, and rows do not attend to each
    other."""
    length = _length([sum(map(len, rows)) for rows in packs], longest, multiple)
    inputs, labels = _blank(len(packs), length, _PADDING_ID), _blank(len(packs), length, IGNORE_INDEX)
    positions, documents = _blank(len(packs), length, 0), _blank(len(packs), length, _PADDING)
    for place, rows in enumerate(packs):
        start = 0
        for number, row in enumerate(rows):
            here = slice(start, start + len(row))
            inputs[place, here], labels[place, here] = row.inputs, row.labels
            positions[place, here], documents[place, here] = np.arange(len(row)), number
            start += len(row)
        positions[place, start:] = np.arange(length - start)  # padding is a document of its own
    return MicroBatch(
        input_ids=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        sequence_ids=torch.from_numpy(documents),
        padding=int((documents == _PADDING).sum()),
        squared_lengths=sum(len(row) ** 2 for rows in packs for row in rows),
    )


def _length(lengths: Sequence[int], longest: int, multiple: int) -> int:
    return min(longest, -(-max(lengths) // multiple) * multiple)


def _blank(rows: int, length: int, value: int) -> np.ndarray:
    return np.full((rows, length), value, dtype=np.int64)


def packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Row numbers of each pack. A pack has at most ``capacity`` tokens. Depends on the arguments alone, so all ranks
    compute equal packs.

    Best fit, longest row first: at most 11/9 of the optimal number of packs, plus a small constant (Johnson, Demers,
    Ullman, Garey & Graham, SIAM J. Comput. 3(4), 1974). Packs are ordered by their first, longest row; rows of equal
    length keep the order of the file. Raises ValueError if a row is longer than the capacity.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if longest_first and lengths[longest_first[0]] > capacity:
        raise ValueError(f"a row of {lengths[longest_first[0]]} tokens for packs of {capacity}")
    found: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, ascending
    for row in longest_first:
        at = bisect_left(rooms, lengths[row])
        if at == len(rooms):
            pack, room = len(found), capacity
            found.append([])
        else:
            room = rooms[at]
            pack = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        found[pack].append(row)
        left = room - lengths[row]
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(pack)
    return found

"""Rows of unequal length → one micro batch: padded, packed, or pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kit.engines.base import IGNORE_INDEX, MicroBatch
from kit.training.data.fine_tuning_rows import Row

_MULTIPLE = 8
"""Lengths are rounded up to it: GEMMs on tensor cores are fastest at multiples of 8 in 16 bits."""
_PADDING_ID = 0
"""Stands in padded places. Any id does: no token that counts attends to them, and their labels do not count."""
_PADDING = -1
"""Document number of padding."""


def padded(rows: Sequence[Row], longest: int, fixed: bool = False) -> MicroBatch:
    """A row each. ``longest``: the job's seq_length, never exceeded; ``fixed``: every micro batch has that length."""
    length = _length([len(row) for row in rows], longest, fixed)
    inputs, labels = _blank(len(rows), length, _PADDING_ID), _blank(len(rows), length, IGNORE_INDEX)
    for place, row in enumerate(rows):
        inputs[place, : len(row)], labels[place, : len(row)] = row.inputs, row.labels
    sources = [row.source for row in rows if row.source is not None]
    if not sources:
        return MicroBatch(input_ids=torch.from_numpy(inputs), labels=torch.from_numpy(labels))
    length = _length([len(source) for source in sources], longest, fixed)
    source_ids, mask = _blank(len(rows), length, _PADDING_ID), _blank(len(rows), length, 0)
    for place, source in enumerate(sources):
        source_ids[place, : len(source)], mask[place, : len(source)] = source, 1
    return MicroBatch(
        input_ids=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        source_ids=torch.from_numpy(source_ids),
        source_mask=torch.from_numpy(mask),
    )


def packed(packs: Sequence[Sequence[Row]], longest: int, fixed: bool = False) -> MicroBatch:
    """Several rows in each sequence; positions start again and attention ends with each of them."""
    length = _length([sum(map(len, rows)) for rows in packs], longest, fixed)
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
    )


def _length(lengths: Sequence[int], longest: int, fixed: bool) -> int:
    return longest if fixed else min(longest, -(-max(lengths) // _MULTIPLE) * _MULTIPLE)


def _blank(rows: int, length: int, value: int) -> np.ndarray:
    return np.full((rows, length), value, dtype=np.int64)

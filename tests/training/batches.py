"""Micro batches for engine tests, made without the data package."""

from __future__ import annotations

import torch

from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from tests.support import tiny


def sample(index: int, masked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample ``index``: inputs and shifted labels; with ``masked``, a different number of labels counts in each."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, tiny.VOCAB_SIZE, (tiny.SEQ_LENGTH + 1,), generator=generator)
    labels = tokens[1:].clone()
    if masked:
        labels[: (index * 7) % tiny.SEQ_LENGTH] = IGNORE_INDEX
    return tokens[:-1], labels


def micro_batches(
    step: int, *, mbs: int, accumulation: int, dp_rank: int = 0, dp_size: int = 1, masked: bool = True
) -> list[MicroBatch]:
    """The same samples of a step on every layout with the same global batch size."""
    first = step * mbs * accumulation * dp_size
    rows = [
        [sample(first + (a * dp_size + dp_rank) * mbs + b, masked) for b in range(mbs)] for a in range(accumulation)
    ]
    return [MicroBatch(*(torch.stack(column) for column in zip(*each, strict=True))) for each in rows]

"""The samples of these tests: fixed length for pretraining, rows of unequal length for fine-tuning and for pairs."""

from __future__ import annotations

import numpy as np

from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from kit.specs.job import Objective
from kit.training.data.fine_tuning_rows import Row
from kit.training.data.samples import padded
from tests.support import tiny
from tests.training import batches


def micro_batches(
    objective: Objective, step: int, *, mbs: int, accumulation: int, dp_rank: int, dp_size: int
) -> list[MicroBatch]:
    """The same samples of a step on every layout; fixed lengths have 1 to 32 labels that count."""
    if objective == "pretrain":
        return batches.micro_batches(step, mbs=mbs, accumulation=accumulation, dp_rank=dp_rank, dp_size=dp_size)
    first = step * mbs * accumulation * dp_size
    return [
        padded([row(objective, first + (a * dp_size + dp_rank) * mbs + b) for b in range(mbs)], longest=tiny.SEQ_LENGTH)
        for a in range(accumulation)
    ]


def row(objective: Objective, index: int) -> Row:
    """sft: 3 to 29 tokens, of which those after a prompt count. seq2seq: sources of 3 to 17 tokens, targets of 2 to 23.
    Neighbours differ much, so that ranks and micro batches differ in length."""
    generator = np.random.default_rng(index)
    if objective == "sft":
        tokens = generator.integers(0, tiny.VOCAB_SIZE, 4 + index * 11 % 27)
        labels = tokens[1:].copy()
        labels[: generator.integers(0, len(labels))] = IGNORE_INDEX
        return Row(inputs=tokens[:-1], labels=labels)
    source, target = (generator.integers(0, tiny.VOCAB_SIZE, n) for n in (3 + index * 5 % 15, 2 + index * 7 % 22))
    return Row(inputs=np.concatenate([[1], target[:-1]]), labels=target, source=source)

"""Micro batches as megatron-core's schedules want them: equally long, and enough of them.

What is added does not count, and nothing before it sees it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.base import IGNORE_INDEX, MicroBatch

PADDING = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "sequence_ids": -1}
"""Field of a micro batch → what rows are filled up with."""


def length_unit(config: TransformerConfig) -> int:
    """What a row's length must be a multiple of: two chunks a context-parallel rank, equal parts under SP."""
    parts = config.context_parallel_size * config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(parts, 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)


def equally_long(micro_batches: Sequence[MicroBatch], unit: int) -> Sequence[MicroBatch]:
    """Rows filled up to the longest of the step, for which a pipeline has its buffers, and to a multiple of ``unit``.

    Where nothing is missing they are left as they are.
    """
    longest = max(batch.input_ids.shape[1] for batch in micro_batches)
    length = -(-longest // unit) * unit
    return [_lengthened(batch, length) for batch in micro_batches]


def _lengthened(batch: MicroBatch, length: int) -> MicroBatch:
    missing = length - batch.input_ids.shape[1]
    if not missing:
        return batch
    held = {name: value for name in PADDING if (value := getattr(batch, name)) is not None}
    padded = {name: torch.nn.functional.pad(value, (0, missing), value=PADDING[name]) for name, value in held.items()}
    return dataclasses.replace(batch, **padded)


def whole_rounds(micro_batches: Sequence[MicroBatch], config: TransformerConfig) -> list[MicroBatch]:
    """The interleaved schedule takes whole rounds of pp micro batches only: fill up with some that do not count."""
    padded = list(micro_batches)
    if config.virtual_pipeline_model_parallel_size is not None:
        first = padded[0]
        empty = dataclasses.replace(first, labels=torch.full_like(first.labels, IGNORE_INDEX))
        padded += [empty] * (-len(padded) % config.pipeline_model_parallel_size)
    return padded

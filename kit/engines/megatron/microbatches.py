"""Pads micro batches for megatron-core's schedules, and runs one forward pass.

Padding does not count in the loss, and no earlier token attends to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.kernels.ring_attention import local_part
from kit.engines.protocol import IGNORE_INDEX, MicroBatch

_PADDING = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "sequence_ids": -1}
"""Field of a micro batch → padding value."""


def length_unit(config: TransformerConfig) -> int:
    """Row lengths must be a multiple of this number: context parallelism needs two equal chunks per rank, sequence
    parallelism one equal part per rank."""
    parts = config.context_parallel_size * config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(parts, 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)


def pad_to_longest(micro_batches: Sequence[MicroBatch], unit: int) -> Sequence[MicroBatch]:
    """Pad all rows to the step's longest row, rounded up to a multiple of ``unit``: pipeline stages allocate buffers
    of one length.

    A micro batch that needs no padding is returned unchanged.
    """
    longest = max(batch.input_ids.shape[1] for batch in micro_batches)
    length = -(-longest // unit) * unit
    return [_padded(batch, length) for batch in micro_batches]


def _padded(batch: MicroBatch, length: int) -> MicroBatch:
    missing = length - batch.input_ids.shape[1]
    if not missing:
        return batch
    held = {name: value for name in _PADDING if (value := getattr(batch, name)) is not None}
    padded: dict[str, Any] = {
        name: torch.nn.functional.pad(value, (0, missing), value=_PADDING[name]) for name, value in held.items()
    }
    return dataclasses.replace(batch, **padded)


def pad_to_whole_rounds(micro_batches: Sequence[MicroBatch], config: TransformerConfig) -> list[MicroBatch]:
    """Add micro batches without labels, so that their number is a multiple of pp, as the interleaved schedule
    requires."""
    padded = list(micro_batches)
    if config.virtual_pipeline_model_parallel_size is not None:
        first = padded[0]
        empty = dataclasses.replace(first, labels=torch.full_like(first.labels, IGNORE_INDEX))
        padded += [empty] * (-len(padded) % config.pipeline_model_parallel_size)
    return padded


def forward(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, mask), both (batch, this rank's sequence). Losses are fp32; before the last stage, activations instead.
    The mask is True for labels that are not ``IGNORE_INDEX``."""
    device = torch.cuda.current_device()
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(batch.input_ids.shape[1], device=device).expand_as(batch.input_ids)
    group = parallel_state.get_context_parallel_group()
    # Copy whole tensors to the device before splitting them: only whole tensors are page-locked, and the host waits for
    # copies from other memory.
    input_ids, labels, position_ids = (
        local_part(whole.to(device, non_blocking=True), 1, group)
        for whole in (batch.input_ids, batch.labels, positions)
    )
    # ``sequence_ids`` stay whole and on the CPU, because Python code reads the documents' boundaries
    # (kit/engines/megatron/model/attention.py).
    counted = labels != IGNORE_INDEX
    output = model(
        input_ids,
        position_ids,
        attention_mask=batch.sequence_ids,
        labels=labels,
        loss_mask=counted.float(),
        rotate=batch.position_ids is not None,
    )
    return output, counted

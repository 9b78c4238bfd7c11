"""Micro batches through Megatron-core's model: padded as its schedules need them, and one forward pass.

Padding does not count in the loss, and no token before it sees it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.base import IGNORE_INDEX, MicroBatch
from kit.engines.megatron.model.cp_all_gather import local_part

_PADDING = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "sequence_ids": -1}
"""Field of a micro batch → value that rows are padded with."""


def length_unit(config: TransformerConfig) -> int:
    """Rows must have a multiple of this length: two chunks a context-parallel rank, equal parts under SP."""
    parts = config.context_parallel_size * config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(parts, 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)


def pad_to_longest(micro_batches: Sequence[MicroBatch], unit: int) -> Sequence[MicroBatch]:
    """Rows filled up to the longest of the step, for which a pipeline has its buffers, and to a multiple of ``unit``.

    Where nothing is missing they are left as they are.
    """
    longest = max(batch.input_ids.shape[1] for batch in micro_batches)
    length = -(-longest // unit) * unit
    return [_padded(batch, length) for batch in micro_batches]


def _padded(batch: MicroBatch, length: int) -> MicroBatch:
    missing = length - batch.input_ids.shape[1]
    if not missing:
        return batch
    held = {name: value for name in _PADDING if (value := getattr(batch, name)) is not None}
    padded = {name: torch.nn.functional.pad(value, (0, missing), value=_PADDING[name]) for name, value in held.items()}
    return dataclasses.replace(batch, **padded)


def pad_to_whole_rounds(micro_batches: Sequence[MicroBatch], config: TransformerConfig) -> list[MicroBatch]:
    """The interleaved schedule takes whole rounds of pp micro batches only: fill up with some that do not count."""
    padded = list(micro_batches)
    if config.virtual_pipeline_model_parallel_size is not None:
        first = padded[0]
        empty = dataclasses.replace(first, labels=torch.full_like(first.labels, IGNORE_INDEX))
        padded += [empty] * (-len(padded) % config.pipeline_model_parallel_size)
    return padded


def forward(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 losses, or activations before the last stage; which of this rank's labels count), (batch, sequence)."""
    device = torch.cuda.current_device()
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(batch.input_ids.shape[1], device=device).expand_as(batch.input_ids)
    group = parallel_state.get_context_parallel_group()
    # Copied before they are cut: only the batch itself is page-locked, and the host waits for copies of what is not.
    input_ids, labels, position_ids = (
        local_part(whole.to(device, non_blocking=True), 1, group)
        for whole in (batch.input_ids, batch.labels, positions)
    )
    # The documents stay whole, and on the CPU: their boundaries are read in Python
    # (kit/engines/megatron/model/attention.py).
    output = model(
        input_ids,
        position_ids,
        attention_mask=batch.sequence_ids,
        labels=labels,
        rotate=batch.position_ids is not None,
    )
    return output, labels != IGNORE_INDEX

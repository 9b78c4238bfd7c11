"""One micro batch through a chunk of Megatron-core's model: the same under Megatron's schedules and under DeepSpeed."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from kit.engines.base import IGNORE_INDEX, MicroBatch
from kit.engines.megatron.model.cp_all_gather import local_part


def forward(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 losses, or activations before the last stage; which of this rank's labels count), (batch, sequence)."""
    device = torch.cuda.current_device()
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    group = parallel_state.get_context_parallel_group()
    input_ids, labels, position_ids = (
        local_part(whole, 1, group).to(device, non_blocking=True)
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

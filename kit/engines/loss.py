"""The loss of contract 3 on Hugging Face logits: a sum over the tokens that count, and their global number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kit.engines.base import IGNORE_INDEX, MicroBatch
from kit.errors import EngineError


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Nats, computed in fp32. ``logits``: (batch, sequence, vocabulary); ``labels``: (batch, sequence)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def global_tokens(
    micro_batches: Sequence[MicroBatch], device: torch.device, group: dist.ProcessGroup | None = None
) -> int:
    """Collective. Labels that count, over a group's ranks (all for None) and micro batches. Raises EngineError where
    none does."""
    local = sum(int((micro_batch.labels != IGNORE_INDEX).sum()) for micro_batch in micro_batches)
    count = torch.tensor(local, dtype=torch.int64, device=device)
    dist.all_reduce(count, group=group)
    tokens = int(count.item())
    if tokens == 0:
        raise EngineError("no label of this step counts (all are masked); check the data's label masks")
    return tokens

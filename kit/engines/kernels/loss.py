"""The loss on Hugging Face logits: a sum over labels that are not ``IGNORE_INDEX``, and their global number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kit.engines.protocol import IGNORE_INDEX, LossSum, MicroBatch
from kit.errors import EngineError


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy in nats: an fp32 scalar. ``logits``: (batch, sequence, vocabulary); ``labels``: (batch,
    sequence)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def mean_scale(tokens: torch.Tensor, averaged_over: int) -> torch.Tensor:
    """Factor on a summed loss that gives gradients of the mean loss: an fp32 scalar on the device. ``tokens``: the
    step's global number; ``averaged_over``: number of ranks over which the engine averages gradients."""
    return (averaged_over / tokens.clamp(min=1).double()).float()


def to_host(loss_sum: torch.Tensor, tokens: torch.Tensor, *more: torch.Tensor) -> tuple[LossSum, list[float]]:
    """Copy loss sum, token count and ``more`` (other scalars of the step) to the host. Waits for the device, once.

    Raises EngineError if all labels are masked. The host cannot know this earlier; gradients exist then, and are zero.
    """
    scalars = [scalar.to(loss_sum.device, torch.float64) for scalar in (loss_sum, tokens, *more)]
    nats, count, *rest = torch.stack(scalars).tolist()
    if count == 0:
        raise EngineError("no label of this step counts (all are masked); check the data's label masks")
    return LossSum(loss_sum=nats, tokens=int(count)), rest


def counted_loss(loss: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """(summed loss, counted labels) of a micro batch, float64, for ``sums_by_set``. The host does not wait for it."""
    labels = (micro_batch.labels != IGNORE_INDEX).sum().to(loss.device, torch.float64, non_blocking=True)
    return torch.stack([loss.detach().double(), labels])


def sums_by_set(found: Iterable[tuple[MicroBatch, torch.Tensor]]) -> dict[int, tuple[float, float]]:
    """``Engine.set_sums`` of micro batches and their (loss sum, counted labels). Waits for the device if there is a
    blend."""
    known = [(batch.data_set, sums) for batch, sums in found if batch.data_set is not None]
    total: dict[int, tuple[float, float]] = {}
    values = torch.stack([sums for _, sums in known]).tolist() if known else []
    for (data_set, _), (loss, labels) in zip(known, values, strict=True):
        before = total.get(data_set, (0.0, 0.0))
        total[data_set] = before[0] + loss, before[1] + labels
    return total


@torch.no_grad()
def evaluation_loss(
    model: torch.nn.Module,
    loss_of: Callable[[MicroBatch], torch.Tensor],
    micro_batches: Sequence[MicroBatch],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> LossSum:
    """Collective. The loss of ``model``, without gradients. ``loss_of``: micro batch → summed loss, an fp32 scalar.

    ``group``: ranks with different tokens; None: all ranks. Raises EngineError if all labels are masked.
    """
    tokens = global_tokens(micro_batches, device, group)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    try:
        for micro_batch in micro_batches:
            loss_sum += loss_of(micro_batch)
    finally:
        model.train()
    dist.all_reduce(loss_sum, group=group)
    return to_host(loss_sum, tokens)[0]


def global_tokens(
    micro_batches: Sequence[MicroBatch], device: torch.device, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Collective. Number of labels that are not ``IGNORE_INDEX``, over the ranks of ``group`` (None: all ranks) and all
    micro batches: a scalar on the device. The host does not wait for it."""
    local = [(micro_batch.labels != IGNORE_INDEX).sum() for micro_batch in micro_batches]
    count = torch.stack(local).sum().to(device, non_blocking=True)
    dist.all_reduce(count, group=group)
    return count

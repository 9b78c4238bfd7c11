"""Context parallelism: each rank has part of every sequence, and keys and values are gathered for attention.

The sequence is cut into 2·cp chunks, and rank r gets chunks r and 2·cp−1−r ("zig-zag"), so that causal attention
costs every rank the same. megatron-core's rotary embedding takes the same order
(models/common/embeddings/rope_utils.py, get_pos_emb_on_this_cp_rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kit.engines.megatron.model.attention import Scores, causal_attention


def local_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The two chunks of this rank, concatenated along ``dim``: the shape of ``tensor``, which holds whole sequences
    along ``dim``, but for that dimension divided by cp; same dtype."""
    if group.size() == 1:
        return tensor
    chunks = tensor.chunk(2 * group.size(), dim)
    return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]], dim)


def all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    scores: Scores,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the whole sequence; (sequence / cp, batch, heads, head_dim) each.

    ``documents``: (batch, sequence), of whole rows. Two calls, one a chunk of queries: each sees the keys up to its own
    end, and its diagonal is at the lower right.
    """
    key, value = (_GatherSequence.apply(part, group) for part in (key, value))  # type: ignore[no-untyped-call]
    length = query.shape[0] // 2
    places = (group.rank(), 2 * group.size() - 1 - group.rank())
    outputs = []
    for part, place in zip(query.split(length), places, strict=True):
        end = (place + 1) * length
        seen = None if documents is None else documents[:, :end]
        outputs.append(causal_attention(part, key[:end], value[:end], scores, seen))
    return torch.cat(outputs)


class _GatherSequence(torch.autograd.Function):
    """Zig-zag parts (sequence / cp, …) → the whole sequence in order; backward sums what all ranks made of it.

    Our own, because that of torch.distributed.nn fails in backward on a subgroup of gloo.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        size = group.size()
        gathered = part.new_empty(size * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
        halves = gathered.unflatten(0, (size, 2, -1))
        return torch.cat([halves[:, 0], halves[:, 1].flip(0)]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        chunks = gradient.unflatten(0, (2 * size, -1))
        by_rank = torch.stack([chunks[:size], chunks[size:].flip(0)], dim=1).flatten(0, 2).contiguous()
        part = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, by_rank, group=ctx.group)
        return part, None

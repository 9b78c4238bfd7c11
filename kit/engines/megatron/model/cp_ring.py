"""Ring attention: keys and values go round the context-parallel ranks while queries stay (Liu et al. 2023, arXiv
2310.01889), over sequences cut in the zig-zag order of ``context.py``.

A rank holds its own part of keys and values and the one that passes through, never the whole. Torch's flash kernels
attend to each part and return the log-sum-exp of the scores too; by it the results of two parts are joined (Dao et al.
2022, arXiv 2205.14135, section 3.1), and backward needs no more than the joined ones.

Of the part of another rank either the first chunk is before all queries here, or both chunks are before the second
chunk of the queries: half of what a whole part would cost, on every rank and in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_aten = torch.ops.aten


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, scale: float | None
) -> torch.Tensor:
    """Causal attention of this rank's queries to the whole sequence; (sequence / cp, batch, heads, head_dim) each."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tensors = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    attended = _Ring.apply(*tensors, group, scale)  # type: ignore[no-untyped-call]
    return attended.permute(2, 0, 1, 3)


class _Ring(torch.autograd.Function):
    """(batch, heads, sequence / cp, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        scale: float,
    ) -> torch.Tensor:
        result = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        own = torch.stack([key, value])
        for source, part in _passing(own, group):
            seen, hidden = _visible(query.shape[2], group.rank(), source)
            keys, values = (_repeated(tensor, query.shape[1]) for tensor in part[:, :, :, :hidden])
            attended, summed, *_ = flash_forward(query[:, :, seen:], keys, values, source == group.rank(), scale)
            joined = torch.logaddexp(total[:, :, seen:], summed)
            weights = ((before - joined).exp().unsqueeze(-1) for before in (total[:, :, seen:], summed))
            result[:, :, seen:] = result[:, :, seen:] * next(weights) + attended * next(weights)
            total[:, :, seen:] = joined
        result = result.to(query.dtype)
        ctx.save_for_backward(query, own, result, total)
        ctx.group, ctx.scale = group, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, own, result, total = ctx.saved_tensors
        group, rank = ctx.group, ctx.group.rank()
        of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        # Gradients travel behind their keys and values, and are home after a whole round.
        of_part = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for source, part in _passing(own, group):
            seen, hidden = _visible(query.shape[2], rank, source)
            found = _kernel_backward(
                gradient[:, :, seen:],
                query[:, :, seen:],
                result[:, :, seen:],
                total[:, :, seen:],
                part[:, :, :, :hidden],
                source == rank,
                ctx.scale,
            )
            of_query[:, :, seen:] += found[0]
            of_part[:, :, :, :hidden] += torch.stack(found[1:])
            of_part = _exchange(of_part, group)()
        return of_query.to(query.dtype), *of_part.to(own.dtype).unbind(), None, None


def _visible(length: int, rank: int, source: int) -> tuple[int, int]:
    """(first query that sees anything, keys that are seen) of the part of ``source``."""
    if source < rank:
        return 0, length // 2
    return (0 if source == rank else length // 2), length


def _passing(own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank it belongs to, keys and values): one's own first, the next one under way while one is used."""
    part = own
    for step in range(group.size()):
        arrives = _exchange(part, group) if step + 1 < group.size() else None
        yield (group.rank() - step) % group.size(), part
        if arrives is not None:
            part = arrives()


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start to send to the next rank and receive from the one before; a function that waits and gives what came."""
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    sent = [tensor.contiguous()]
    after, before = ((group.rank() + step) % group.size() for step in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent[0], group=group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=group, group_peer=before),
        ]
    )

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        sent.clear()  # it had to stay until now
        return received

    return wait


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Key/value heads as often as query heads."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """(result, log-sum-exp, …) of CUDA's kernel, of tensors (batch, heads, sequence, head_dim); the log-sum-exp is fp32
    (batch, heads, sequence). On a CPU another stands here (cpu.py)."""
    return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)


def flash_backward(
    tensors: tuple[torch.Tensor, ...], total: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value by CUDA's kernel, each of its tensor's shape and dtype.

    ``tensors``: gradient, query, key, value, result, each (batch, heads, sequence, head_dim); ``total``: log-sum-exp.
    """
    query, key = tensors[1], tensors[2]
    lengths = query.shape[2], key.shape[2]
    random = torch.empty(2, dtype=torch.uint64, device=query.device), torch.empty((), device=query.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        *tensors, total.contiguous(), None, None, *lengths, 0.0, causal, *random, scale=scale
    )


def _kernel_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    result: torch.Tensor,
    total: torch.Tensor,
    key_value: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, given the joined result and log-sum-exp."""
    heads = key_value.shape[2]
    tensors = gradient, query, *(_repeated(tensor, query.shape[1]) for tensor in key_value), result
    found = flash_backward(tensors, total, causal, scale)
    grouped = (tensor.float().unflatten(1, (heads, -1)).sum(2) for tensor in found[1:3])
    return found[0], *grouped

"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values rotate over the context-parallel ranks.

Each sequence is split into 2·cp chunks, and rank r gets chunks r and 2·cp−1−r ("zig-zag"), so that causal attention
costs the same on every rank. Each rank has its own queries, its own keys and values, and those of one other rank at a
time. Torch's flash kernels attend to one rank's keys and return the
log-sum-exp of the scores. It serves to merge the results of two parts (Dao et al. 2022, arXiv 2205.14135, section 3.1).
Backward needs only the merged result and log-sum-exp.

A lower rank's first chunk precedes all queries of this rank, and its second chunk none. A higher rank's two chunks
precede only the second chunk of queries. So every round costs half of a full part, on every rank.

In packed rows a query attends to its own document. Two chunks share at most one document, except a chunk with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_aten = torch.ops.aten


def local_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The two chunks of this rank, concatenated along ``dim``, in the same dtype. ``tensor`` has whole sequences along
    ``dim``; in the result this dimension is divided by cp."""
    if group.size() == 1:
        return tensor
    chunks = tensor.chunk(2 * group.size(), dim)
    return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]], dim)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float | None,
    documents: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the whole sequence. Arguments and result are (batch, heads,
    sequence / cp, head_dim); keys and values may have fewer heads.

    ``documents``: lengths of the documents of each row, in whole sequences; None: a row is one document."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended: torch.Tensor = _Ring.apply(query, key, value, group, scale, documents)  # type: ignore[no-untyped-call]
    return attended


class _Ring(torch.autograd.Function):
    """Ring attention on tensors (batch, heads, sequence / cp, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        scale: float,
        documents: Sequence[Sequence[int]] | None,
    ) -> torch.Tensor:
        # (batch, sequence, heads, head_dim) in memory, as the output projection reads it
        result = query.new_zeros(query.transpose(1, 2).shape, dtype=torch.float32).transpose(1, 2)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        own = torch.stack([key, value])
        for source, part in _passing(own, group):
            for rows, queries, hidden, causal in _visible(query.shape[2], group, source, documents):
                here = rows, slice(None), queries
                keys, values = (_repeated(tensor, query.shape[1]) for tensor in part[:, rows, :, hidden])
                attended, summed, *_ = flash_forward(query[here], keys, values, causal, scale)
                joined = torch.logaddexp(total[here], summed)
                earlier, new = ((before - joined).exp().unsqueeze(-1) for before in (total[here], summed))
                result[here].mul_(earlier).addcmul_(attended, new)
                total[here] = joined
        result = result.to(query.dtype)
        ctx.save_for_backward(query, own, result, total)
        ctx.group, ctx.scale, ctx.documents = group, scale, documents
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, own, result, total = ctx.saved_tensors
        group = ctx.group
        of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        # Gradients of keys and values rotate one step behind them. After cp steps they are back on their own rank.
        of_part = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for source, part in _passing(own, group):
            for rows, queries, hidden, causal in _visible(query.shape[2], group, source, ctx.documents):
                here = rows, slice(None), queries
                of_query[here] += _kernel_backward(
                    gradient[here],
                    query[here],
                    result[here],
                    total[here],
                    part[:, rows, :, hidden],
                    of_part[:, rows, :, hidden],
                    causal,
                    ctx.scale,
                )
            of_part = _exchange(of_part, group)()
        return of_query.to(query.dtype), *of_part.to(own.dtype).unbind(), None, None, None


class _Call(NamedTuple):
    """One call of the kernel: in these rows, these queries attend to these keys, all of them or causally."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def _visible(
    length: int, group: dist.ProcessGroup, source: int, documents: Sequence[Sequence[int]] | None
) -> Iterator[_Call]:
    """The calls that attend to the keys of rank ``source``. ``length``: of a rank's part of a row."""
    rank, half, ranks = group.rank(), length // 2, group.size()
    if documents is None:
        queries = slice(half if source > rank else 0, length)
        yield _Call(slice(None), queries, slice(0, half if source < rank else length), source == rank)
        return
    own, others = ((place, 2 * ranks - 1 - place) for place in (rank, source))
    for row, lengths in enumerate(documents):
        for (at, chunk), (before, other) in product(enumerate(own), enumerate(others)):
            if other > chunk:
                continue
            for end, size in zip(accumulate(lengths), lengths, strict=True):
                queries = _overlap(end - size, end, chunk * half, half, at * half)
                keys = _overlap(end - size, end, other * half, half, before * half)
                if queries.start < queries.stop and keys.start < keys.stop:
                    yield _Call(slice(row, row + 1), queries, keys, chunk == other)


def _overlap(start: int, end: int, first: int, size: int, at: int) -> slice:
    """Where a document is in a chunk that begins at position ``first`` of the row and at ``at`` of a rank's part."""
    return slice(max(start - first, 0) + at, min(end - first, size) + at)


def _passing(own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, that rank's keys and values), this rank's first. Receives the next part while the caller uses one."""
    part = own
    for step in range(group.size()):
        arrives = _exchange(part, group) if step + 1 < group.size() else None
        yield (group.rank() - step) % group.size(), part
        if arrives is not None:
            part = arrives()


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start to send ``tensor`` to the next rank, and to receive one from the rank before. Returns a function that waits
    and returns the received tensor."""
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
        sent.clear()  # the tensor must exist until it is sent
        return received

    return wait


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key/value heads, so that there are as many as query heads."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """(result, log-sum-exp, …) of torch's kernel. Tensors are (batch, heads, sequence, head_dim); the log-sum-exp is
    fp32 (batch, heads, sequence)."""
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)


def flash_backward(
    tensors: tuple[torch.Tensor, ...], total: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value by torch's kernel, in the shapes and dtypes of these tensors.

    ``tensors``: gradient, query, key, value, result, each (batch, heads, sequence, head_dim); ``total``: log-sum-exp.
    """
    query, key = tensors[1], tensors[2]
    if query.device.type == "cpu":
        # This kernel expects the log-sum-exp in memory order (batch, sequence, heads).
        total = total.transpose(1, 2).contiguous().transpose(1, 2)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, total, 0.0, causal, scale=scale)
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
    of_key_value: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Gradient of the query; adds those of key and value to ``of_key_value``. ``result``, ``total``: the merged result
    and log-sum-exp."""
    heads = key_value.shape[2]
    tensors = gradient, query, *(_repeated(tensor, query.shape[1]) for tensor in key_value), result
    of_query, *repeated = flash_backward(tensors, total, causal, scale)[:3]
    for summed, each in zip(of_key_value, repeated, strict=True):
        summed += each.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32)
    return of_query

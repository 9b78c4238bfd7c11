"""The blocks of full Hugging Face tensors that this rank writes; all ranks together write every element once.

Data-parallel ranks with the same shard split it: by the ranges of the distributed optimizer, or, where each has all of
it, into equal ranges. A range of the flattened shard is at most three rectangles, and a slice of a rectangle is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from kit.engines.base import StateBlock, StateKind
from kit.engines.megatron.resharding.groups import ShardGroups
from kit.engines.megatron.resharding.huggingface import HfResharder, owner_ranks
from kit.engines.megatron.weights import MappedParam

_Rectangle = tuple[int, int, torch.Tensor]
"""First row and column in the shard, values."""


@torch.no_grad()
def export_blocks(
    resharder: HfResharder, kinds: Sequence[StateKind], *, in_order: bool = False
) -> Iterator[StateBlock]:
    """This rank's blocks (``Engine.export_blocks``). Each rank starts at another tensor, because one process at a time
    writes a file. ``in_order``: all ranks start at the first, for state that is read collectively."""
    items = [
        (kind, number, mapped)
        for kind in kinds
        for number, mapped in enumerate(resharder.mapped_params)
        if mapped.megatron in resharder.parameters
    ]
    first = 0 if in_order else len(items) * dist.get_rank() // dist.get_world_size()
    for kind, number, mapped in items[first:] + items[:first]:
        groups = resharder.shard_groups(mapped)
        if not mapped.sharding.sharded and groups.tensor.rank() != owner_ranks(number, groups)[1]:
            continue
        for rectangle in _rectangles(kind, groups, resharder.parameters[mapped.megatron]):
            yield from _blocks(kind, mapped, resharder, rectangle)


def _rectangles(kind: StateKind, groups: ShardGroups, param: torch.nn.Parameter) -> Iterator[_Rectangle]:
    """This rank's range of the flattened shard: the end of a row, whole rows, the beginning of a row."""
    start, values = groups.state.own(kind, param)
    width = math.prod(groups.state.shape(param)[1:])
    end = start + values.numel()
    edges = sorted({start, min(end, -(-start // width) * width), max(start, end // width * width), end})
    for lower, upper in pairwise(edges):
        row, column = divmod(lower, width)
        yield row, column, values[lower - start : upper - start].view(-1, min(width, upper - lower))


def _blocks(
    kind: StateKind, mapped: MappedParam, resharder: HfResharder, rectangle: _Rectangle
) -> Iterator[StateBlock]:
    """The intersection of a rectangle with each slice of the shard, at its place in the Hugging Face tensor."""
    row, column, values = rectangle
    shapes = resharder.shapes(mapped)
    for piece in resharder.slices(mapped, resharder.shard_groups(mapped).tensor.rank()):
        at = row if piece.dim == 0 else column
        lower, upper = max(at, piece.at), min(at + values.shape[piece.dim], piece.at + piece.length)
        if lower >= upper:
            continue
        found = values.narrow(piece.dim, lower - at, upper - lower)
        start = piece.start + lower - piece.at
        where = (start, column) if piece.dim == 0 else (row, start)
        if piece.transposed:
            where, found = where[::-1], found.t()
        yield StateBlock(kind, mapped.hugging_face[piece.tensor], shapes[piece.tensor], *where, found)

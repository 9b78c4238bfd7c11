"""Which parts of full Hugging Face tensors this rank writes: together all ranks write every element once.

Ranks with the same shard share it out: by the ranges of the distributed optimizer, or, where each has all of it, in
equal ones. A range of the flattened shard is at most three rectangles, and a rule's piece keeps a rectangle one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from kit.engines.base import Part, StateKind
from kit.engines.megatron.resharding.buffers import Frozen
from kit.engines.megatron.resharding.groups import Place
from kit.engines.megatron.resharding.huggingface import Exchange, turn
from kit.engines.megatron.resharding.optimizer_state import LocalState
from kit.engines.megatron.weights import Group
from kit.engines.megatron.weights.sharding import Piece

_Rectangle = tuple[int, int, torch.Tensor]
"""First row and column in the shard, values."""


@torch.no_grad()
def parts(exchange: Exchange, kinds: Sequence[StateKind]) -> Iterator[Part]:
    """See ``PartsExport``. Ranks begin at different places, for one file is written by one process at a time."""
    items = [
        (kind, number, group)
        for kind in kinds
        for number, group in enumerate(exchange.groups)
        if group.megatron in exchange.parameters
    ]
    first = len(items) * dist.get_rank() // dist.get_world_size()
    for kind, number, group in items[first:] + items[:first]:
        place = exchange.place(group)
        if not group.rule.sharded and place.tensor.rank() != turn(number, place)[1]:
            continue
        pieces = exchange.pieces(group, place.tensor.rank())
        for rectangle in _rectangles(kind, place, exchange.parameters[group.megatron]):
            yield from _cut(kind, group, pieces, rectangle)


def _rectangles(kind: StateKind, place: Place, param: torch.nn.Parameter) -> Iterator[_Rectangle]:
    """This rank's range of the flattened shard: what is left of a row, whole rows, what is begun of one."""
    assert isinstance(place.state, LocalState | Frozen)
    start, values = place.state.own(kind, param)
    width = param.numel() // param.shape[0]
    end = start + values.numel()
    edges = sorted({start, min(end, -(-start // width) * width), max(start, end // width * width), end})
    for lower, upper in pairwise(edges):
        row, column = divmod(lower, width)
        yield row, column, values[lower - start : upper - start].view(-1, min(width, upper - lower))


def _cut(kind: StateKind, group: Group, pieces: Sequence[Piece], rectangle: _Rectangle) -> Iterator[Part]:
    """What each piece has in common with it, where the tensor on disk has that."""
    row, column, values = rectangle
    for piece in pieces:
        at = row if piece.dim == 0 else column
        lower, upper = max(at, piece.at), min(at + values.shape[piece.dim], piece.at + piece.length)
        if lower >= upper:
            continue
        found = values.narrow(piece.dim, lower - at, upper - lower)
        start = piece.start + lower - piece.at
        where = (start, column) if piece.dim == 0 else (row, start)
        name = group.hugging_face[piece.tensor]
        if piece.transposed:
            yield Part(kind, name, where[1], where[0], found.t())
        else:
            yield Part(kind, name, *where, found)

"""Exports this rank's blocks of full Hugging Face tensors. All ranks together export every element once.

Data-parallel ranks with equal shards export different ranges: those of the distributed optimizer, or equal ranges if
each rank has the whole state. A range of a flattened matrix consists of at most three rectangles, and a slice of a
rectangle is a rectangle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kit.engines.collective import from_own_place
from kit.engines.megatron.resharding.huggingface import HfResharder
from kit.engines.megatron.weights.mapping import ParamMapping
from kit.engines.megatron.weights.sharding import ShardSlice
from kit.engines.protocol import StateBlock, StateKind, rectangles


@torch.no_grad()
def export_blocks(
    resharder: HfResharder, kinds: Sequence[StateKind], *, in_order: bool = False
) -> Iterator[StateBlock]:
    """This rank's blocks (``Engine.export_blocks``). ``in_order``: all ranks start at the first tensor, for state that
    needs collectives."""
    items = [
        (kind, mapped)
        for kind in kinds
        for number, mapped in enumerate(resharder.mapped_params)
        if resharder.writes(number, mapped)
    ]

    def by_columns(item: tuple[StateKind, ParamMapping]) -> bool:
        tensor = resharder.shard_groups(item[1]).tensor
        return tensor.size() > 1 and any(piece.disk_dim == 1 for piece in resharder.slices(item[1], tensor.rank()))

    for kind, mapped in items if in_order else from_own_place(items, by_columns):
        groups, shapes = resharder.shard_groups(mapped), resharder.shapes(mapped)
        param, slices = resharder.parameters[mapped.megatron], resharder.slices(mapped, groups.tensor.rank())
        for piece, where, values in parts(*groups.state.own(kind, param), groups.state.shape(param), slices):
            at, found = (where[::-1], values.t()) if piece.transposed else (where, values)
            yield StateBlock(kind, mapped.hugging_face[piece.tensor], shapes[piece.tensor], *at, found)


def parts(
    start: int, values: torch.Tensor, shape: Sequence[int], slices: Sequence[ShardSlice]
) -> Iterator[tuple[ShardSlice, tuple[int, int], torch.Tensor]]:
    """Intersect a range of a flattened shard with ``slices``. Yields (slice, (row, column) in the slice's whole tensor,
    matrix of the values).

    The range is ``values``, from element ``start`` on; ``shape``: shape of the shard.
    """
    for row, column, rectangle in rectangles(start, values, math.prod(shape[1:])):
        for piece in slices:
            at = row if piece.dim == 0 else column
            lower, upper = max(at, piece.at), min(at + rectangle.shape[piece.dim], piece.at + piece.length)
            if lower < upper:
                moved = piece.start + lower - piece.at
                where = (moved, column) if piece.dim == 0 else (row, moved)
                yield piece, where, rectangle.narrow(piece.dim, lower - at, upper - lower)

"""A rank's shard as part of the whole Megatron parameter, which is the shard that a single rank would hold.

Native checkpoints name Megatron parameters, so that a layout finds its parts in what another one wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kit.engines.megatron.weights.sharding import Shape, Sharding, ShardSlice
from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class Block:
    """Rows (``dim`` 0) or columns (1) that a shard has in common with the whole parameter."""

    dim: int
    at: int
    """Where they start in the shard."""
    start: int
    """Where they start in the whole parameter."""
    length: int


def whole_shape(sharding: Sharding, shapes: Sequence[Shape], model: ModelSpec) -> Shape:
    """The shape of the whole Megatron parameter, vocabulary not padded."""
    slices = sharding.slices(shapes, model, 1, 0)
    shape = list(shapes[0][::-1] if slices[0].transposed else shapes[0])
    shape[slices[0].dim] = sum(piece.length for piece in slices)
    return tuple(shape)


def blocks(sharding: Sharding, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[Block]:
    """Every part of this rank's shard that is not padding; together the ranks cover the whole parameter."""
    whole = sharding.slices(shapes, model, 1, 0)
    found: list[Block] = []
    for mine in sharding.slices(shapes, model, tp, rank):
        # A replicated tensor is one piece of rows, also where the whole parameter is one piece of columns.
        for other in (piece for piece in whole if piece.tensor == mine.tensor and piece.dim == mine.dim):
            if (block := _common(mine, other)) is not None:
                found.append(block)
    return _merged(sorted(found, key=lambda block: block.at))


def _common(mine: ShardSlice, whole: ShardSlice) -> Block | None:
    lower, upper = max(mine.start, whole.start), min(mine.start + mine.length, whole.start + whole.length)
    if lower >= upper:
        return None
    return Block(mine.dim, mine.at + lower - mine.start, whole.at + lower - whole.start, upper - lower)


def _merged(parts: list[Block]) -> list[Block]:
    """Neighbours in the shard that are neighbours in the whole parameter, made one."""
    merged: list[Block] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and last.at + last.length == part.at and last.start + last.length == part.start:
            merged[-1] = Block(last.dim, last.at, last.start, last.length + part.length)
        else:
            merged.append(part)
    return merged

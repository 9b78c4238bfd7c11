"""How tensor-parallel ranks split the Hugging Face tensors of one Megatron parameter.

A rule lists, for one rank, the blocks of the tensors on disk that make up its shard, and their positions in the shard.
Reading copies blocks into the shard, writing copies them back: one list serves both directions. A rank needs only its
own blocks of a tensor. Data-parallel ranks may have ranges of a flattened shard: ``parts`` cuts the blocks to them.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING

from kit.engines.protocol import TensorSource, as_matrix, rectangles
from kit.specs.model import ModelSpec

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """Contiguous rows (``dim`` 0) or columns (1) of one Hugging Face tensor that a shard contains."""

    dim: int
    at: int
    """First row or column in the shard."""
    start: int
    """First row or column in the whole tensor."""
    length: int
    tensor: int = 0
    """Index of the Hugging Face tensor in the mapping."""
    transposed: bool = False
    """True if the tensor on disk is (input, output). The shard and ``dim`` are of (output, input)."""

    @property
    def disk_dim(self) -> int:
        """``dim`` of the tensor on disk."""
        return 1 - self.dim if self.transposed else self.dim


def parts(
    start: int, values: torch.Tensor, shape: Sequence[int], slices: Sequence[ShardSlice]
) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Intersect a range of a flattened shard with ``slices``. Yields (index of the Hugging Face tensor, first row,
    first column, matrix), as the tensor is on disk. The matrices are views of ``values``.

    The range is ``values``, from element ``start`` on; ``shape``: shape of the shard. It consists of at most three
    rectangles, and a slice of a rectangle is a rectangle.
    """
    for row, column, rectangle in rectangles(start, values, math.prod(shape[1:])):
        for piece in slices:
            at = row if piece.dim == 0 else column
            lower, upper = max(at, piece.at), min(at + rectangle.shape[piece.dim], piece.at + piece.length)
            if lower < upper:
                moved = piece.start + lower - piece.at
                where = (moved, column) if piece.dim == 0 else (row, moved)
                found = rectangle.narrow(piece.dim, lower - at, upper - lower)
                yield piece.tensor, *((*where[::-1], found.t()) if piece.transposed else (*where, found))


def read_parts(source: TensorSource, names: Sequence[str], found: Iterable[tuple[int, int, int, torch.Tensor]]) -> None:
    """Set the matrices of ``parts`` from the tensors ``names`` of ``source``, one tensor after the other."""
    for tensor, row, column, values in sorted(found, key=itemgetter(0)):
        rows = as_matrix(source.read_block(names[tensor], 0, row, len(values)))
        values.copy_(rows[:, column : column + values.shape[1]])


class Sharding(ABC):
    """A rule that splits the Hugging Face tensors of a parameter over tensor-parallel ranks."""

    @abstractmethod
    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        """The slices of the Hugging Face tensors, of shapes ``shapes``, in the shard of rank ``rank`` of ``tp``. The
        rest of the shard is 0."""


@dataclass(frozen=True)
class ColumnParallel(Sharding):
    """The output (rows) of a column-parallel linear layer: this rank's rows of the tensor; of several tensors its rows
    of each, one after the other. megatron-core chunks each rank's output into gate and up (transformer/mlp.py)."""

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        lengths = [rows // tp for rows, *_ in shapes]
        return [
            ShardSlice(tensor=tensor, dim=0, start=rank * length, length=length, at=at)
            for tensor, (length, at) in enumerate(zip(lengths, accumulate(lengths, initial=0), strict=False))
        ]


@dataclass(frozen=True)
class Replicated(Sharding):
    """Every rank has the whole tensor, for example norms. Several tensors are stacked."""

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        return ColumnParallel().slices(shapes, model, 1, 0)


@dataclass(frozen=True)
class RowParallel(Sharding):
    """The input (columns) of a row-parallel linear layer: contiguous slices."""

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        length = shapes[0][1] // tp
        return [ShardSlice(dim=1, start=rank * length, length=length, at=0)]


@dataclass(frozen=True)
class VocabParallel(Sharding):
    """Rows of the embedding. Zero rows pad the vocabulary to a multiple of tp (padded_vocab_size in
    emit/megatron.py)."""

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        ((rows, *_),) = shapes
        length = -(-rows // tp)
        start = min(rank * length, rows)
        return [ShardSlice(dim=0, start=start, length=min(length, rows - start), at=0)]


@dataclass(frozen=True)
class Transposed(Sharding):
    """A weight that is (input, output) on disk, like GPT-2's Conv1D. ``rule`` splits it as (output, input)."""

    sharding: Sharding

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        turned = [shape[::-1] for shape in shapes]
        return [dataclasses.replace(each, transposed=True) for each in self.sharding.slices(turned, model, tp, rank)]


@dataclass(frozen=True)
class ConcatenatedRows(Sharding):
    """One tensor on disk that concatenates the rows of several tensors. ``rule`` splits these tensors."""

    sharding: Sharding
    rows: tuple[int, ...]

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        ((_, *rest),) = shapes
        slices = self.sharding.slices([(rows, *rest) for rows in self.rows], model, tp, rank)
        return [
            dataclasses.replace(piece, tensor=0, start=piece.start + sum(self.rows[: piece.tensor])) for piece in slices
        ]


@dataclass(frozen=True)
class QKV(Sharding):
    """Query, key and value rows. The whole parameter has one group of rows per key/value head: its queries, its key,
    its value (transformer/attention.py, SelfAttention.get_query_key_value_tensors). Each rank has a slice of it.

    With fewer key/value heads than ranks a slice is a part of a group, and megatron-core gathers the group.
    """

    def slices(self, shapes: Sequence[Shape], model: ModelSpec, tp: int, rank: int) -> list[ShardSlice]:
        groups = model.num_key_value_heads
        rows = [shape[0] // groups for shape in shapes]  # rows of each tensor in one group
        length = groups * sum(rows) // tp
        first, last = rank * length, (rank + 1) * length
        slices, at = [], 0
        for group in range(groups):
            for tensor, count in enumerate(rows):
                lower, upper = max(at, first), min(at + count, last)
                if lower < upper:
                    start = group * count + lower - at
                    piece = ShardSlice(tensor=tensor, dim=0, start=start, length=upper - lower, at=lower - first)
                    slices.append(piece)
                at += count
        return slices

"""How the Hugging Face tensors of one Megatron parameter are laid out over tensor-parallel ranks.

``split`` takes full Hugging Face tensors to one shard a rank; ``join`` is its exact inverse. Both work on weights
(rows, columns) and on one-dimensional biases, and copy elements without computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kit.specs.model import ModelSpec

Tensors = Sequence[torch.Tensor]


class Rule(Protocol):
    """One way of sharding."""

    @property
    def sharded(self) -> bool:
        """False where every rank holds the whole parameter."""

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        """Full Hugging Face tensors → ``tp`` shards of the Megatron parameter."""

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        """All shards, in rank order → full Hugging Face tensors."""


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every rank: norms."""

    sharded: bool = False

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        (tensor,) = tensors
        return [tensor] * tp

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Sliced:
    """Contiguous slices along one dimension: 1 for the input of a row-parallel linear layer."""

    dim: int
    sharded: bool = True

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        (tensor,) = tensors
        return list(tensor.chunk(tp, self.dim))

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the embedding, padded with zeros to a multiple of the ranks (padded_vocab_size in emit/megatron.py)."""

    sharded: bool = True

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        (tensor,) = tensors
        padding = -tensor.shape[0] % tp
        return list(torch.nn.functional.pad(tensor, (0, 0, 0, padding)).chunk(tp))

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: model.vocab_size]]


@dataclass(frozen=True)
class GatedRows:
    """Gate and up projection: each is sliced first, then a rank's two slices are stacked.

    transformer/mlp.py chunks each rank's output into gate and up.
    """

    sharded: bool = True

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        gate, up = tensors
        return [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp), strict=True)]

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        pairs = [shard.chunk(2) for shard in shards]
        return [torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])]


@dataclass(frozen=True)
class Transposed:
    """A weight that lies on disk as (input, output), as GPT-2's Conv1D has it; ``rule`` sees (output, input)."""

    rule: Rule

    @property
    def sharded(self) -> bool:
        return self.rule.sharded

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        return self.rule.split([tensor.t() for tensor in tensors], model, tp)

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        return [tensor.t().contiguous() for tensor in self.rule.join(shards, model)]


@dataclass(frozen=True)
class Fused:
    """One tensor on disk whose rows are those of several, one after the other; ``rule`` sees the parts."""

    rule: Rule
    rows: tuple[int, ...]

    @property
    def sharded(self) -> bool:
        return self.rule.sharded

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        (tensor,) = tensors
        return self.rule.split(tensor.split(self.rows), model, tp)

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        return [torch.cat(self.rule.join(shards, model))]


@dataclass(frozen=True)
class GroupedQkv:
    """Query, key and value rows, interleaved per key/value head: its queries, its key, its value; then sliced.

    transformer/attention.py, SelfAttention.get_query_key_value_tensors. With fewer key/value heads than ranks a
    slice is part of such a group, and megatron-core gathers it.
    """

    sharded: bool = True

    def split(self, tensors: Tensors, model: ModelSpec, tp: int) -> list[torch.Tensor]:
        groups = model.num_key_value_heads
        per_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return list(torch.cat(per_group, dim=1).flatten(0, 1).chunk(tp))

    def join(self, shards: Tensors, model: ModelSpec) -> list[torch.Tensor]:
        joined = torch.cat(list(shards))
        queries = model.num_attention_heads // model.num_key_value_heads * model.head_dim
        grouped = joined.reshape(model.num_key_value_heads, -1, *joined.shape[1:])
        return [
            part.flatten(0, 1).contiguous() for part in grouped.split([queries, model.head_dim, model.head_dim], dim=1)
        ]

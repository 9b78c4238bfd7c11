"""Megatron's parameters under Hugging Face names, from the shards of all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kit.engines.megatron.weights import ParamMapping
from kit.engines.megatron.weights.sharding import Shape, Sharding
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec

Shards = Callable[[ParamMapping, list[Shape]], list[torch.Tensor]]
"""(parameter, shapes of its Hugging Face tensors) → its part of each tensor-parallel rank. Raises CheckpointError."""


class MegatronSource(TensorSource):
    """One kind of state under Hugging Face names. The weight map's rules join and split the parameters; the shards of
    one parameter are in memory at a time."""

    def __init__(
        self,
        model: ModelSpec,
        params: Iterable[ParamMapping],
        shapes: Mapping[str, Shape],
        kind: StateKind,
        shards: Shards,
    ) -> None:
        """``shapes``: Hugging Face name → shape of the whole tensor."""
        self._model, self._shapes, self._kind, self._shards = model, shapes, kind, shards
        self._place = {name: (mapped, i) for mapped in params for i, name in enumerate(mapped.hugging_face)}
        self._held: tuple[str, list[torch.Tensor]] = ("", [])

    def names(self) -> Sequence[str]:
        """All Hugging Face names of the model. In this order, each Megatron parameter is read once."""
        return list(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in the dtype on disk. Raises CheckpointError."""
        if name not in self._place:
            raise CheckpointError(f"tensor {name} is not one of {self._model.name}'s")
        mapped, index = self._place[name]
        if mapped.frozen and self._kind is not StateKind.MASTER:
            return torch.zeros(self._shapes[name])
        shapes = [self._shapes[each] for each in mapped.hugging_face]
        if self._held[0] != mapped.megatron:
            self._held = ("", [])  # frees them before the next ones are read
            self._held = (mapped.megatron, self._shards(mapped, shapes))
        shards = self._held[1]
        full = torch.empty(shapes[index], dtype=shards[0].dtype)
        for rank, shard in enumerate(shards):
            for piece in mapped.sharding.slices(shapes, self._model, len(shards), rank):
                if piece.tensor == index:
                    block = shard.narrow(piece.dim, piece.at, piece.length)
                    (full.t() if piece.transposed else full).narrow(piece.dim, piece.start, piece.length).copy_(block)
        return full


def shard_shape(sharding: Sharding, shapes: Sequence[Shape], model: ModelSpec, tp: int = 1, rank: int = 0) -> Shape:
    """Shape of a rank's shard of the Megatron parameter, without padding of the vocabulary; by default of the whole."""
    first, *others = sharding.slices(shapes, model, tp, rank)
    shape = list(shapes[first.tensor][::-1] if first.transposed else shapes[first.tensor])
    shape[first.dim] = sum(piece.length for piece in (first, *others))
    return tuple(shape)

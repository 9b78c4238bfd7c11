"""Megatron's parameters under Hugging Face names, from the shards of all tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kit.addons.importers.tensors import HeldSource
from kit.engines.megatron.weights import ParamMapping
from kit.engines.megatron.weights.sharding import Shape, Sharding
from kit.engines.protocol import StateKind, TensorSource
from kit.specs.model import ModelSpec

Shards = Callable[[ParamMapping, list[Shape]], list[torch.Tensor]]
"""(parameter, shapes of its Hugging Face tensors) → its part of each tensor-parallel rank. Raises CheckpointError."""


def megatron_source(
    model: ModelSpec,
    params: Iterable[ParamMapping],
    shapes: Mapping[str, Shape],
    kind: StateKind,
    shards: Shards,
) -> TensorSource:
    """One kind of state under Hugging Face names. The weight map's rules join and split the parameters. ``shapes``:
    Hugging Face name → shape of the whole tensor."""
    own = {mapped.megatron: mapped for mapped in params}

    def parts(name: str) -> Mapping[str, torch.Tensor]:
        names, sharding = own[name].hugging_face, own[name].sharding
        of_each = [shapes[each] for each in names]
        # A layer of a width of 0 does not exist in Megatron.
        if (own[name].frozen and kind is not StateKind.MASTER) or not any(map(math.prod, of_each)):
            return {each: torch.zeros(shapes[each]) for each in names}
        return dict(zip(names, _joined(sharding, of_each, model, shards(own[name], of_each)), strict=True))

    return HeldSource({each: name for name, mapped in own.items() for each in mapped.hugging_face}, shapes, parts)


def _joined(
    sharding: Sharding, shapes: list[Shape], model: ModelSpec, shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The Hugging Face tensors of a parameter, from all of its shards."""
    whole = [torch.empty(shape, dtype=shards[0].dtype) for shape in shapes]
    for rank, shard in enumerate(shards):
        for piece in sharding.slices(shapes, model, len(shards), rank):
            full = whole[piece.tensor].t() if piece.transposed else whole[piece.tensor]
            full.narrow(piece.dim, piece.start, piece.length).copy_(shard.narrow(piece.dim, piece.at, piece.length))
    return whole


def shard_shape(sharding: Sharding, shapes: Sequence[Shape], model: ModelSpec, tp: int = 1, rank: int = 0) -> Shape:
    """Shape of a rank's shard of the Megatron parameter, without padding of the vocabulary; by default of the whole."""
    first, *others = sharding.slices(shapes, model, tp, rank)
    shape = list(shapes[first.tensor][::-1] if first.transposed else shapes[first.tensor])
    shape[first.dim] = sum(piece.length for piece in (first, *others))
    return tuple(shape)

"""Exports this rank's blocks of full Hugging Face tensors. All ranks together export every element once.

Data-parallel ranks with equal shards export different ranges: those of the distributed optimizer, or equal ranges if
each rank has the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kit.engines.collective import from_own_place
from kit.engines.megatron.resharding.huggingface import HfResharder
from kit.engines.megatron.weights.mapping import ParamMapping
from kit.engines.megatron.weights.sharding import parts
from kit.engines.protocol import StateKind, TensorShard


@torch.no_grad()
def export_blocks(
    resharder: HfResharder, kinds: Sequence[StateKind], *, in_order: bool = False
) -> Iterator[TensorShard]:
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
        for tensor, row, column, values in parts(*groups.state.own(kind, param), groups.state.shape(param), slices):
            yield TensorShard(kind, mapped.hugging_face[tensor], shapes[tensor], row, column, values)

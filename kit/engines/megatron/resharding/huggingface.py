"""Full tensors under Hugging Face names ↔ the shards of this model, one group of tensors at a time.

Import: every rank reads its own blocks of each tensor. ``export.py`` is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from kit.engines.base import StateKind, TensorSource
from kit.engines.huggingface.models import check_names, check_shape, tensor_shapes
from kit.engines.megatron.model.transformer_engine import plain_name
from kit.engines.megatron.resharding.buffers import Frozen
from kit.engines.megatron.resharding.groups import Place
from kit.engines.megatron.weights import Group, tensor_groups, weight_map
from kit.engines.megatron.weights.blocks import Block, blocks
from kit.engines.megatron.weights.sharding import Piece, Shape
from kit.specs.model import ModelSpec


class Exchange:
    """The way in and out of one engine's model; every method is collective over all ranks."""

    def __init__(
        self,
        model: ModelSpec,
        config: TransformerConfig,
        chunks: list[torch.nn.Module],
        dense: Place,
        experts: Place,
    ) -> None:
        self.model, self._dense, self._experts = model, dense, experts
        self.groups = list(tensor_groups(weight_map(model), model))
        self._shapes = tensor_shapes(model)
        self.parameters = _global_names(config, chunks)
        self._check_complete()

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Set one kind of state from full tensors, reading this rank's blocks. Raises CheckpointError for others."""
        check_names(self._shapes, source)
        for group in self.groups:
            place = self.place(group)
            mine = [self.parameters[name] for name in (group.megatron, group.copy) if name in self.parameters]
            mine = [param for param in mine if place.state.wants(kind, param)]
            if not mine:
                continue
            for name in group.hugging_face:
                check_shape(name, self._shapes[name], source.shape(name))
            pieces = self.pieces(group, place.tensor.rank())
            for piece in sorted(pieces, key=lambda piece: piece.tensor):  # a tensor is read once
                name = group.hugging_face[piece.tensor]
                block = source.read_block(name, piece.disk_dim, piece.start, piece.length)
                block = block.t() if piece.transposed else block
                for param in mine:
                    place.state.put(kind, param, piece.dim, piece.at, block)
            for param in mine:
                _clear_padding(place, kind, param, pieces)

    def place(self, group: Group) -> Place:
        """Who holds it."""
        place = self._dense if group.expert is None else self._experts
        return replace(place, state=Frozen(place.data)) if group.frozen else place

    def pieces(self, group: Group, rank: int) -> list[Piece]:
        """What a rank of the group's tensor-parallel ranks holds of it."""
        return group.rule.pieces(self.shapes(group), self.model, self.place(group).tensor.size(), rank)

    def blocks(self, group: Group) -> list[Block]:
        """Where this rank's shard of it lies in the whole Megatron parameter."""
        tensor = self.place(group).tensor
        return blocks(group.rule, self.shapes(group), self.model, tensor.size(), tensor.rank())

    def shapes(self, group: Group) -> list[Shape]:
        """Shapes of its Hugging Face tensors."""
        return [self._shapes[name] for name in group.hugging_face]

    def _check_complete(self) -> None:
        mapped = {name for group in self.groups for name in (group.megatron, group.copy)}
        assert not self.parameters.keys() - mapped, sorted(self.parameters.keys() - mapped)
        names = {name for group in self.groups for name in group.hugging_face}
        assert names == self._shapes.keys(), sorted(names ^ self._shapes.keys())


def turn(number: int, place: Place) -> tuple[int, int]:
    """(data-parallel rank, tensor-parallel rank) whose turn the group of this number is."""
    return number % place.data.size(), number // place.data.size() % place.tensor.size()


def _clear_padding(place: Place, kind: StateKind, param: torch.nn.Parameter, pieces: Sequence[Piece]) -> None:
    """Rows of the vocabulary that only padding fills."""
    dim = pieces[0].dim
    covered = sum(piece.length for piece in pieces)
    shape = list(place.state.shape(param))
    if missing := shape[dim] - covered:
        shape[dim] = missing
        place.state.put(kind, param, dim, covered, torch.zeros(shape))


def _global_names(config: TransformerConfig, chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by name, layers and experts counted over the whole model instead of on this rank."""
    first_expert = 0
    if config.num_moe_experts is not None:
        first_expert = config.num_moe_experts // config.expert_model_parallel_size
        first_expert *= parallel_state.get_expert_model_parallel_rank()
    parameters: dict[str, torch.nn.Parameter] = {}
    for wrapped in chunks:
        chunk = unwrap_model(wrapped)
        offset = get_transformer_layer_offset(config, chunk.vp_stage)
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, param in chain(chunk.named_parameters(), buffers):
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                parts[place] = str(int(parts[place]) + first_expert)
            parameters[plain_name(".".join(parts))] = param
    return parameters

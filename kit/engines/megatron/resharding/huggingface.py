"""Maps full tensors under Hugging Face names to this rank's shards, one Megatron parameter at a time.

To import, every rank reads its own blocks of each tensor. ``export.py`` exports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from kit.engines.huggingface.models import check_names, check_shape, tensor_shapes
from kit.engines.megatron.model.transformer_engine import plain_name
from kit.engines.megatron.resharding.groups import BufferState, ShardGroups
from kit.engines.megatron.weights import ParamMapping, mapped_params, weight_map
from kit.engines.megatron.weights.mapping import LAST_EMBEDDING
from kit.engines.megatron.weights.sharding import Replicated, Shape, ShardSlice
from kit.engines.protocol import StateKind, TensorSource, as_matrix
from kit.specs.model import ModelSpec


class HfResharder:
    """Reads full tensors into one engine's model, and lists this rank's shards for an export."""

    def __init__(
        self,
        model: ModelSpec,
        config: TransformerConfig,
        chunks: list[torch.nn.Module],
        dense: ShardGroups,
        experts: ShardGroups,
        adapters: tuple[Sequence[ParamMapping], Mapping[str, Shape]] | None = None,
    ) -> None:
        """``adapters``: LoRA's entries and shapes on disk, which are read and listed instead of the model's weights."""
        self.model, self._dense, self._experts = model, dense, experts
        self.mapped_params, self._shapes = adapters or (
            list(mapped_params(weight_map(model), model)),
            tensor_shapes(model),
        )
        named = global_names(config, chunks)
        self.parameters = {name: each for name, each in named.items() if (".adapter." in name) == bool(adapters)}
        self._check_complete()

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Collective. Set one kind of state; reads this rank's blocks of the full tensors. Raises CheckpointError if
        names or shapes differ from the model's."""
        check_names(self._shapes, source)
        for mapped in self.mapped_params:
            groups = self.shard_groups(mapped)
            mine = [param for param in self.held(mapped) if groups.state.wants(kind, param)]
            if not mine:
                continue
            for name in mapped.hugging_face:
                check_shape(name, self._shapes[name], source.shape(name))
            slices = self.slices(mapped, groups.tensor.rank())
            for piece in sorted(slices, key=lambda piece: piece.tensor):  # a tensor is read once
                name = mapped.hugging_face[piece.tensor]
                block = source.read_block(name, piece.disk_dim, piece.start, piece.length)
                block = as_matrix(block.t() if piece.transposed else block)
                for param in mine:
                    groups.state.put(kind, param, *piece.corner, block)
            for param in mine:
                _clear_padding(groups, kind, param, slices)

    def held(self, mapped: ParamMapping) -> list[torch.nn.Parameter]:
        """This rank's Megatron parameters of ``mapped``: none, one, or two for a tied embedding."""
        return [self.parameters[name] for name in (mapped.megatron, mapped.copy) if name in self.parameters]

    def shard_groups(self, mapped: ParamMapping) -> ShardGroups:
        """The groups of the ranks that have slices of this parameter."""
        groups = self._dense if mapped.expert is None else self._experts
        return replace(groups, state=BufferState(groups.data)) if mapped.frozen else groups

    def slices(self, mapped: ParamMapping, rank: int) -> list[ShardSlice]:
        """The slices of the Hugging Face tensors on tensor-parallel rank ``rank``."""
        return mapped.sharding.slices(self.shapes(mapped), self.model, self.shard_groups(mapped).tensor.size(), rank)

    def writes(self, number: int, mapped: ParamMapping) -> bool:
        """Whether this rank writes a part of parameter ``number``. If all tensor-parallel ranks have the whole
        parameter, one of them writes it, in turns."""
        tensor = self.shard_groups(mapped).tensor
        mine = not isinstance(mapped.sharding, Replicated) or tensor.rank() == number % tensor.size()
        return mine and mapped.megatron in self.parameters

    def shapes(self, mapped: ParamMapping) -> list[Shape]:
        """Shapes of the Hugging Face tensors of this parameter."""
        return [self._shapes[name] for name in mapped.hugging_face]

    def _check_complete(self) -> None:
        mapped = {name for mapped in self.mapped_params for name in (mapped.megatron, mapped.copy)}
        assert not self.parameters.keys() - mapped, sorted(self.parameters.keys() - mapped)
        names = {name for mapped in self.mapped_params for name in mapped.hugging_face}
        assert names == self._shapes.keys(), sorted(names ^ self._shapes.keys())


def _clear_padding(
    groups: ShardGroups, kind: StateKind, param: torch.nn.Parameter, slices: Sequence[ShardSlice]
) -> None:
    """Set the vocabulary's padding rows to zero."""
    shape, covered = list(groups.state.shape(param)), sum(piece.length for piece in slices)
    if missing := shape[slices[0].dim] - covered:
        groups.state.put(kind, param, covered, 0, torch.zeros(missing, *shape[1:]))


def global_names(config: TransformerConfig, chunks: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Name → parameter on this rank. Names count layers and experts over the whole model."""
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
            if parts[0] == "embedding" and not chunk.pre_process:
                name = LAST_EMBEDDING
                parts = name.split(".")
            if "local_experts" in parts:
                groups = parts.index("local_experts") + 1
                parts[groups] = str(int(parts[groups]) + first_expert)
            parameters[plain_name(".".join(parts))] = param
    return parameters

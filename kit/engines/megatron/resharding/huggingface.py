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
from kit.engines.megatron.weights.sharding import Replicated, Shape, ShardSlice, parts, read_parts
from kit.engines.protocol import StateKind, TensorSource
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
        assert kind is not StateKind.GRADIENT
        check_names(self._shapes, source)
        for mapped in self.mapped_params:
            groups, shapes = self.shard_groups(mapped), self.shapes(mapped)
            state, slices = groups.state, self.slices(mapped, groups.tensor.rank())
            targets = [(param, *target) for param in self.held(mapped) for target in state.targets(kind, param)]
            for name, shape in zip(mapped.hugging_face, shapes, strict=True) if targets else ():
                check_shape(name, shape, source.shape(name))
            found: list[tuple[int, int, int, torch.Tensor]] = []
            for param, start, values in targets:
                values.zero_()  # the vocabulary's padding is not on disk
                found += parts(start, values, state.shape(param), slices)
            read_parts(source, mapped.hugging_face, found)
            for param, _, values in targets:
                state.put(kind, param, values)

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

"""Full tensors under Hugging Face names ↔ the shards of this model, one group of tensors at a time.

Import: every rank reads what it holds a part of, cuts it, and keeps its shard. Export: the tensor-parallel ranks that
hold a group send their shards to their first rank, the group's owner, which joins them and passes the tensors to the
main rank (global rank 0).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from kit.engines.base import StateKind, TensorSource
from kit.engines.hf import check_names, check_shape, parameter_shapes
from kit.engines.megatron.places import Place
from kit.engines.megatron.weights import Group, tensor_groups, weight_map
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
        self._model, self._dense, self._experts = model, dense, experts
        self._groups = list(tensor_groups(weight_map(model), model))
        self._shapes = parameter_shapes(model)
        self._stages = _stage_of_layer(config)
        self._last_stage = config.pipeline_model_parallel_size - 1
        self._parameters = _global_names(config, chunks)
        self._check_complete()

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Set one kind of state from full tensors. Raises CheckpointError for other names or shapes."""
        check_names(self._shapes, source)
        for group in self._groups:
            mine = [self._parameters[name] for name in (group.megatron, group.copy) if name in self._parameters]
            if not mine:
                continue
            tensors = [source.read(name) for name in group.hugging_face]
            for name, tensor in zip(group.hugging_face, tensors, strict=True):
                check_shape(name, self._shapes[name], tuple(tensor.shape))
            place = self._place(group)
            shard = group.rule.split(tensors, self._model, place.tensor.size())[place.tensor.rank()]
            for param in mine:
                place.state.set(kind, param, shard)

    def stream(self, kind: StateKind) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, full fp32 CPU tensor on the main rank, None elsewhere), in the order of the weight map."""
        for group in self._groups:
            tensors = self._gather(kind, group)
            for index, name in enumerate(group.hugging_face):
                yield name, None if tensors is None else tensors[index]

    def _gather(self, kind: StateKind, group: Group) -> list[torch.Tensor] | None:
        place, is_main = self._place(group), dist.get_rank() == 0
        if group.megatron not in self._parameters:
            return self._receive(group, place.owner(self._stage(group), group.expert)) if is_main else None
        # Collective over data parallelism where that shards the state, so before anyone leaves.
        shard = place.state.get(kind, self._parameters[group.megatron])
        if place.data.rank() != 0:
            return None
        shards = _to_first(shard, place.tensor) if group.rule.sharded else [shard]
        if place.tensor.rank() != 0:
            return None
        tensors = group.rule.join(shards, self._model)
        if is_main:
            return [tensor.cpu().clone() for tensor in tensors]
        for tensor in tensors:
            dist.send(tensor.contiguous(), dst=0)
        return None

    def _receive(self, group: Group, owner: int) -> list[torch.Tensor]:
        received = []
        for name in group.hugging_face:
            buffer = torch.empty(self._shapes[name], dtype=torch.float32, device=torch.cuda.current_device())
            dist.recv(buffer, src=owner)
            received.append(buffer.cpu())
        return received

    def _place(self, group: Group) -> Place:
        return self._dense if group.expert is None else self._experts

    def _stage(self, group: Group) -> int:
        """Pipeline rank that holds a group; of a tied embedding, the first of its two."""
        if group.layer is not None:
            return self._stages[group.layer]
        return 0 if group.megatron.startswith("embedding.") else self._last_stage

    def _check_complete(self) -> None:
        mapped = {name for group in self._groups for name in (group.megatron, group.copy)}
        assert not self._parameters.keys() - mapped, sorted(self._parameters.keys() - mapped)
        names = {name for group in self._groups for name in group.hugging_face}
        assert names == self._shapes.keys(), sorted(names ^ self._shapes.keys())


def _to_first(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather to the first rank of the group; an empty list on the others."""
    first = dist.get_global_rank(group, 0)
    shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else []
    dist.gather(shard.contiguous(), shards or None, dst=first, group=group)
    return shards


def _stage_of_layer(config: TransformerConfig) -> list[int]:
    """Pipeline rank of every layer of the whole model, as megatron-core places them."""
    uneven = config.pipeline_model_parallel_layout
    stages = [-1] * config.num_layers
    for pp_rank in range(config.pipeline_model_parallel_size):
        for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
            chunk = None if config.virtual_pipeline_model_parallel_size is None else vp_stage
            if uneven is not None:  # the functions below look at this rank's place only
                for layer in uneven.get_layer_id_list(vp_stage=chunk, pp_rank=pp_rank):
                    stages[layer] = pp_rank
                continue
            offset = get_transformer_layer_offset(config, chunk, pp_rank)
            count = get_num_layers_to_build(config, chunk, pp_rank)
            stages[offset : offset + count] = [pp_rank] * count
    assert -1 not in stages
    return stages


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
        for name, param in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + offset)
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                parts[place] = str(int(parts[place]) + first_expert)
            parameters[".".join(parts)] = param
    return parameters

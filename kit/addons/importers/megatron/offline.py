"""Converts full tensors under Hugging Face names to a torch_dist checkpoint and back, in one process.

The weight map's rules, with a tensor parallel size of 1, join and split Megatron's parameters. Memory: one Megatron
parameter, one stored block and one Hugging Face tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kit.addons.importers import torch_dist
from kit.addons.importers.megatron.names import WEIGHT, stored_location
from kit.addons.importers.torch_dist import Checkpoint, ReadBlock, WriteBlock
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import check_tensors, tensor_shapes
from kit.engines.megatron.weights import ParamMapping, mapped_params, weight_map
from kit.engines.megatron.weights.adapters import adapter_params
from kit.engines.megatron.weights.sharding import Shape, Sharding, VocabParallel, parts, read_parts
from kit.engines.protocol import StateKind, TensorSource, as_matrix, place
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


class MegatronSource(TensorSource):
    """A ``TensorSource`` of one kind of state of a torch_dist checkpoint, from any program and layout.

    MASTER reads the fp32 master weights, or the model's weights if the checkpoint has no master weights. ``lora``: set
    if the checkpoint has adapters alone. Raises CheckpointError for another model.
    """

    def __init__(self, checkpoint: Checkpoint, kind: StateKind, model: ModelSpec, lora: LoraSpec | None = None) -> None:
        self._checkpoint, self._kind, self._model = checkpoint, kind, model
        self._shapes = checkpoint_shapes(model, lora)
        params = mapped_params(weight_map(model), model) if lora is None else adapter_params(model, self._shapes)
        self._place = {name: (mapped, i) for mapped in params for i, name in enumerate(mapped.hugging_face)}
        self._held: tuple[str, torch.Tensor] | None = None

    def names(self) -> Sequence[str]:
        """All Hugging Face names of the model. In this order, each Megatron parameter is read once."""
        return list(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in the dtype on disk."""
        if name not in self._place:
            raise CheckpointError(f"tensor {name} is not one of {self._model.name}'s")
        mapped, index = self._place[name]
        shapes = [self._shapes[each] for each in mapped.hugging_face]
        whole = self._parameter(mapped, shapes)
        full = torch.empty(shapes[index], dtype=whole.dtype)
        for piece in mapped.sharding.slices(shapes, self._model, 1, 0):
            if piece.tensor == index:
                block = whole.narrow(piece.dim, piece.at, piece.length)
                (full.t() if piece.transposed else full).narrow(piece.dim, piece.start, piece.length).copy_(block)
        return full

    def _parameter(self, mapped: ParamMapping, shapes: list[Shape]) -> torch.Tensor:
        if self._held is not None and self._held[0] == mapped.megatron:
            return self._held[1]
        self._held = None  # frees it before reading the next parameter
        where = stored_location(mapped.megatron, self._kind, self._model)
        if where.key not in self._checkpoint.tensors and self._kind is StateKind.MASTER:
            where = stored_location(mapped.megatron, WEIGHT, self._model)  # a checkpoint without master weights
        shape = whole_shape(mapped.sharding, shapes, self._model)
        if mapped.frozen and self._kind is not StateKind.MASTER:
            return torch.zeros(shape)
        whole: list[torch.Tensor] = []

        def take(offsets: tuple[int, ...], part: torch.Tensor) -> None:
            if not whole:
                whole.append(torch.empty(shape, dtype=part.dtype))
            row, column, *_ = (*offsets[len(where.index) :], 0)
            place(whole[0], row, column, as_matrix(part.reshape(part.shape[len(where.index) :])))

        self._checkpoint.read(
            [
                ReadBlock(
                    key=where.key,
                    shape=where.counts + shape,
                    offsets=where.index + (0,) * len(shape),
                    sizes=(1,) * len(where.index) + shape,
                    take=take,
                    padded=len(where.index) if isinstance(mapped.sharding, VocabParallel) else None,
                )
            ]
        )
        self._held = mapped.megatron, whole[0]
        return whole[0]


def has_moments(checkpoint: Checkpoint, model: ModelSpec, lora: LoraSpec | None = None) -> bool:
    """Whether the checkpoint has Adam's moments."""
    first, moments = weight_map(model)[0].megatron, (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
    if lora is not None:
        first = adapter_params(model, checkpoint_shapes(model, lora))[0].megatron
    return all(stored_location(first, kind, model).key in checkpoint.tensors for kind in moments)


def write_checkpoint(
    directory: Path,
    model: ModelSpec,
    sources: Mapping[StateKind, TensorSource],
    dtype: torch.dtype,
    common: Mapping[str, Any],
) -> None:
    """Write a torch_dist checkpoint into an existing empty directory: weights in ``dtype``, and the optimizer's fp32
    state if ``sources`` has moments. ``common``: content of ``common.pt``. Raises CheckpointError or OSError."""
    shapes = tensor_shapes(model)
    for source in sources.values():
        check_tensors(shapes, source)
    kinds: list[tuple[str, StateKind, torch.dtype]] = [(WEIGHT, StateKind.MASTER, dtype)]
    if len(sources) > 1:
        kinds += [(kind.value, kind, torch.float32) for kind in sources]
    blocks = list(_blocks(model, shapes, sources, kinds))
    torch_dist.write_blocks(directory, blocks=blocks, common=common)


def _blocks(
    model: ModelSpec,
    shapes: Mapping[str, Shape],
    sources: Mapping[StateKind, TensorSource],
    kinds: Sequence[tuple[str, StateKind, torch.dtype]],
) -> Iterator[WriteBlock]:
    for mapped in mapped_params(weight_map(model), model):
        shapes_on_disk = [shapes[name] for name in mapped.hugging_face]
        shape = whole_shape(mapped.sharding, shapes_on_disk, model)
        for stored_kind, kind, dtype in kinds[:1] if mapped.frozen else kinds:
            dtype = torch.float32 if mapped.frozen else dtype
            where = stored_location(mapped.megatron, stored_kind, model)
            yield WriteBlock(
                key=where.key,
                shape=where.counts + shape,
                offsets=where.index + (0,) * len(shape),
                sizes=(1,) * len(where.index) + shape,
                dtype=dtype,
                read=partial(_put_together, sources[kind], mapped, shapes_on_disk, shape, model, dtype),
            )


def _put_together(
    source: TensorSource,
    mapped: ParamMapping,
    shapes: list[Shape],
    shape: Shape,
    model: ModelSpec,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Build the whole Megatron parameter, of ``shape`` in ``dtype``, from its Hugging Face tensors."""
    whole = torch.empty(shape, dtype=dtype)
    slices = mapped.sharding.slices(shapes, model, 1, 0)
    read_parts(source, mapped.hugging_face, parts(0, whole.view(-1), shape, slices))
    return whole


def whole_shape(sharding: Sharding, shapes: Sequence[Shape], model: ModelSpec) -> Shape:
    """Shape of the whole Megatron parameter, without padding of the vocabulary."""
    slices = sharding.slices(shapes, model, 1, 0)
    shape = list(shapes[0][::-1] if slices[0].transposed else shapes[0])
    shape[slices[0].dim] = sum(piece.length for piece in slices)
    return tuple(shape)

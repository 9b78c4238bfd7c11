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
from kit.addons.importers.megatron.source import megatron_source, shard_shape
from kit.addons.importers.torch_dist import Block, Checkpoint, block_of
from kit.engines.huggingface.adapters import checkpoint_shapes
from kit.engines.huggingface.models import tensor_shapes
from kit.engines.megatron.weights import ParamMapping, mapped_params, weight_map
from kit.engines.megatron.weights.adapters import adapter_params
from kit.engines.megatron.weights.sharding import Shape, VocabParallel, parts, read_parts
from kit.engines.protocol import StateKind, TensorSource
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


def source_of(checkpoint: Checkpoint, kind: StateKind, model: ModelSpec, lora: LoraSpec | None = None) -> TensorSource:
    """One kind of state of a torch_dist checkpoint, from any program and layout.

    MASTER reads the fp32 master weights, or the model's weights if the checkpoint has no master weights. ``lora``: set
    if the checkpoint has adapters alone. Reading raises CheckpointError for another model.
    """
    names = checkpoint_shapes(model, lora)
    params = mapped_params(weight_map(model), model) if lora is None else adapter_params(model, names)

    def whole(mapped: ParamMapping, shapes: list[Shape]) -> list[torch.Tensor]:
        where = stored_location(mapped.megatron, kind, model)
        if where.key not in checkpoint.tensors and kind is StateKind.MASTER:
            where = stored_location(mapped.megatron, WEIGHT, model)  # a checkpoint without master weights
        shape = shard_shape(mapped.sharding, shapes, model)
        vocabulary = len(where.index) if isinstance(mapped.sharding, VocabParallel) else None
        block = checkpoint.block(where.key, *where.block(shape), padded=vocabulary)
        return [block.reshape(shape)]

    return megatron_source(model, params, names, kind, whole)


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
) -> Iterator[Block]:
    for mapped in mapped_params(weight_map(model), model):
        shapes_on_disk = [shapes[name] for name in mapped.hugging_face]
        shape = shard_shape(mapped.sharding, shapes_on_disk, model)
        if 0 in shape:
            continue  # a layer of a width of 0 does not exist in Megatron
        for stored_kind, kind, dtype in kinds[:1] if mapped.frozen else kinds:
            dtype = torch.float32 if mapped.frozen else dtype
            where = stored_location(mapped.megatron, stored_kind, model)
            read = partial(_put_together, sources[kind], mapped, shapes_on_disk, shape, model, dtype)
            yield block_of(where.key, *where.block(shape), dtype, read)


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

"""Entries of weight maps, and their expansion over the layers and experts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from kit.engines.megatron.weights.sharding import Sharding, VocabParallel
from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter and the Hugging Face tensors that it consists of.

    In names, ``{layer}`` stands for each layer and ``{expert}`` for each expert of the layer.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    sharding: Sharding
    copy: str | None = None
    """A second Megatron parameter with the same content, on the last pipeline stage: the tied output layer."""
    experts: bool | None = None
    """True: only in layers with experts. False: only in layers without experts. None: in every layer."""
    frozen: bool = False
    """True for a buffer, which is not trained (``kit/engines/huggingface/buffers.py``)."""


@dataclass(frozen=True)
class MappedParam:
    """One entry at one layer, and for one expert: one Megatron parameter."""

    megatron: str
    """Global parameter name, which counts layers and experts over the whole model."""
    hugging_face: tuple[str, ...]
    sharding: Sharding
    copy: str | None = None
    expert: int | None = None
    """Number of the expert; None for parameters outside of the experts."""
    frozen: bool = False
    """As in ``ParamMapping``."""


def embedding_and_head(model: ModelSpec, embedding: str, head: str) -> tuple[ParamMapping, ...]:
    """Mappings of word embedding and output layer, by their Hugging Face names. One mapping if they are tied."""
    ours, output = "embedding.word_embeddings.weight", "output_layer.weight"
    if model.tied_embeddings:
        return (ParamMapping(ours, (embedding,), VocabParallel(), copy=output),)
    return ParamMapping(ours, (embedding,), VocabParallel()), ParamMapping(output, (head,), VocabParallel())


def weight_and_bias(
    megatron: str, hugging_face: str, weight: Sharding, bias: Sharding | None = None
) -> tuple[ParamMapping, ParamMapping]:
    """Mappings of weight and bias of a norm or linear layer. ``bias``: None if it is sharded like the weight."""
    return (
        ParamMapping(f"{megatron}.weight", (f"{hugging_face}.weight",), weight),
        ParamMapping(f"{megatron}.bias", (f"{hugging_face}.bias",), bias or weight),
    )


def mapped_params(mappings: tuple[ParamMapping, ...], model: ModelSpec) -> Iterator[MappedParam]:
    """Expand the entries: parameters before the layers, the layers one by one, parameters after the layers."""
    for in_layers, group in groupby(mappings, key=lambda mapping: "{layer}" in mapping.megatron):
        of_layer = tuple(group)
        for layer in range(model.num_layers) if in_layers else (0,):
            for mapping in of_layer:
                if mapping.experts not in (None, model.has_experts(layer)):
                    continue
                experts: Iterable[int | None] = range(model.num_experts) if "{expert}" in mapping.megatron else (None,)
                for expert in experts:
                    names = tuple(name.format(layer=layer, expert=expert) for name in mapping.hugging_face)
                    megatron = mapping.megatron.format(layer=layer, expert=expert)
                    yield MappedParam(megatron, names, mapping.sharding, mapping.copy, expert, mapping.frozen)

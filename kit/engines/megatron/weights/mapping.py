"""Entries of weight maps, and their expansion over the layers and experts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from kit.engines.megatron.weights.sharding import ColumnParallel, Replicated, Sharding, VocabParallel
from kit.specs.model import ModelSpec

LAST_EMBEDDING = "mtp.embedding.word_embeddings.weight"
"""The word embedding on a last pipeline stage with heads of multi-token prediction; kit's name of this copy."""


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter and the Hugging Face tensors that it consists of.

    In the names of a weight map, ``{layer}`` stands for each layer and ``{expert}`` for each expert of the layer.
    ``mapped_params`` makes of it an entry for each of them, whose names count over the whole model.
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
    expert: int | None = None
    """Number of the expert; None for parameters outside of the experts, and in a weight map."""


_OF_PREDICTION_HEAD: Mapping[str, tuple[str, Sharding]] = {
    "enorm": ("enorm", Replicated()),
    "hnorm": ("hnorm", Replicated()),
    "eh_proj": ("eh_proj", ColumnParallel()),
    "final_layernorm": ("shared_head.norm", Replicated()),
}
"""Name in megatron-core (transformer/multi_token_prediction.py) → name on disk."""


def embedding_and_head(model: ModelSpec, embedding: str, head: str) -> tuple[ParamMapping, ...]:
    """Mappings of word embedding and output layer, by their Hugging Face names. One mapping if they are tied."""
    ours, output = "embedding.word_embeddings.weight", "output_layer.weight"
    if model.mtp_num_layers:
        return (
            ParamMapping(ours, (embedding,), VocabParallel(), copy=LAST_EMBEDDING),
            ParamMapping(output, (head,), VocabParallel()),
        )
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


def mapped_params(mappings: tuple[ParamMapping, ...], model: ModelSpec) -> Iterator[ParamMapping]:
    """Expand the entries: parameters before the layers, the layers one by one, heads of multi-token prediction,
    parameters after the layers."""
    for in_layers, group in groupby(mappings, key=lambda mapping: "{layer}" in mapping.megatron):
        of_layer = tuple(group)
        for layer in range(model.num_layers) if in_layers else (0,):
            yield from _of_layer(of_layer, model, layer)
        if in_layers:
            for head in range(model.mtp_num_layers):
                yield from _of_prediction_head(of_layer, model, head)


def _of_layer(mappings: Iterable[ParamMapping], model: ModelSpec, layer: int) -> Iterator[ParamMapping]:
    for mapping in mappings:
        if mapping.experts not in (None, model.has_experts(layer)):
            continue
        experts: Iterable[int | None] = range(model.num_experts) if "{expert}" in mapping.megatron else (None,)
        for expert in experts:
            names = tuple(name.format(layer=layer, expert=expert) for name in mapping.hugging_face)
            megatron = mapping.megatron.format(layer=layer, expert=expert)
            yield replace(mapping, megatron=megatron, hugging_face=names, expert=expert)


def _of_prediction_head(mappings: Iterable[ParamMapping], model: ModelSpec, head: int) -> Iterator[ParamMapping]:
    """The transformer layer, norms and projection of a head. On disk a head is a layer after the last one
    (DeepSeek-V3's README_WEIGHTS.md)."""
    ours, layer = f"mtp.layers.{head}.", model.num_layers + head
    for mapped in _of_layer(mappings, model, layer):
        within = mapped.megatron.removeprefix(f"decoder.layers.{layer}.")
        yield replace(mapped, megatron=f"{ours}transformer_layer.{within}")
    for name, (stored, sharding) in _OF_PREDICTION_HEAD.items():
        yield ParamMapping(f"{ours}{name}.weight", (f"model.layers.{layer}.{stored}.weight",), sharding)

"""The vocabulary of weight maps: entries with patterns, and their expansion over the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kit.engines.megatron.weights.sharding import Rule
from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    ``{layer}`` stands for each layer, ``{expert}`` for each of its experts.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    rule: Rule
    copy: str | None = None
    """A second Megatron parameter with the same content, on the last pipeline stage: the tied output layer."""
    experts: bool | None = None
    """True: only in layers with experts; False: only in those without; None: in every layer."""
    frozen: bool = False
    """A buffer, which nothing trains (``kit/engines/huggingface/buffers.py``)."""


@dataclass(frozen=True)
class Group:
    """One entry, at one layer: what is read, held and written together."""

    megatron: str
    """Global parameter name, layers and experts counted over the whole model."""
    hugging_face: tuple[str, ...]
    rule: Rule
    layer: int | None
    """None outside of the layers."""
    copy: str | None
    expert: int | None = None
    """None outside of the experts."""
    frozen: bool = False
    """See ``Entry``."""


def tensor_groups(entries: tuple[Entry, ...], model: ModelSpec) -> Iterator[Group]:
    """Every group of the model: what precedes the layers, layer by layer, what follows them."""
    in_layers = [index for index, entry in enumerate(entries) if "{layer}" in entry.megatron]
    for entry in entries[: in_layers[0]]:
        yield Group(entry.megatron, entry.hugging_face, entry.rule, None, entry.copy)
    for layer in range(model.num_layers):
        for entry in entries[in_layers[0] : in_layers[-1] + 1]:
            if entry.experts not in (None, model.has_experts(layer)):
                continue
            experts: Iterable[int | None] = range(model.num_experts) if "{expert}" in entry.megatron else (None,)
            for expert in experts:
                names = tuple(name.format(layer=layer, expert=expert) for name in entry.hugging_face)
                megatron = entry.megatron.format(layer=layer, expert=expert)
                yield Group(megatron, names, entry.rule, layer, entry.copy, expert, entry.frozen)
    for entry in entries[in_layers[-1] + 1 :]:
        yield Group(entry.megatron, entry.hugging_face, entry.rule, None, entry.copy)

"""Experts as they are stored on disk and as transformers holds them.

transformers 5 fuses the experts of a layer in memory (``mlp.experts.gate_up_proj``, one tensor for all of them); the
files on the hub, and those that ``save_pretrained`` writes, have a tensor for each matrix of each expert
(transformers/conversion_mapping.py, "mixtral" and "qwen2_moe"). Outside of an engine names are always those on disk:
exchange checkpoints, Megatron's weight maps and Hugging Face directories then agree, and no tensor is larger than a
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kit.engines.base import TensorSource
from kit.engines.huggingface import fused_experts
from kit.engines.huggingface.fused_experts import ExpertSlice
from kit.specs.model import ModelSpec


def expert_slices(model: ModelSpec, name: str) -> dict[str, ExpertSlice]:
    """Name on disk → part of the parameter ``name`` of transformers, expert by expert; empty where it is one tensor on
    disk too, and for types that no family describes: these keep the names and shapes of transformers."""
    if model.approximate is not None:
        return {}
    if model.traits.interleaved_experts:
        return fused_experts.interleaved_slices(name, model.num_experts)
    layer, _, fused = name.partition(".mlp.experts.")
    block, gate, up, down = model.traits.mlp_names
    names = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(fused, ())
    return {
        f"{layer}.{block}.experts.{expert}.{matrix}.weight": ExpertSlice(expert, index, len(names), interleaved=False)
        for expert in range(model.num_experts)
        for index, matrix in enumerate(names)
    }


def names_on_disk(model: ModelSpec, name: str) -> list[str]:
    """The tensors on disk of one parameter of transformers: itself, or the matrices of all experts in order."""
    if name == "lm_head.weight":
        return [model.traits.head_name]
    return list(expert_slices(model, name)) or [name.replace(".mlp.", f".{model.traits.mlp_names[0]}.", 1)]


def shapes_on_disk(model: ModelSpec, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk of one parameter of transformers."""
    slices = expert_slices(model, name)
    return {each: part.shape(shape) for each, part in slices.items()} or {names_on_disk(model, name)[0]: shape}


def split_experts(model: ModelSpec, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One parameter (or its gradient or moment) → names on disk and tensors, which are views."""
    if slices := expert_slices(model, name):
        yield from ((each, part.of(tensor)) for each, part in slices.items())
    else:
        yield names_on_disk(model, name)[0], tensor


class FusedExpertsSource(TensorSource):
    """A ``TensorSource`` with the names of transformers' parameters over one with the names on disk."""

    def __init__(self, model: ModelSpec, source: TensorSource, names: Sequence[str]) -> None:
        """``names``: the parameters of the model; what the source has beyond them is shown as it is."""
        self._source = source
        present = set(source.names())
        wanted = {name: names_on_disk(model, name) for name in names}
        self._parts = {name: parts for name, parts in wanted.items() if present.issuperset(parts)}
        self._parts |= {name: [name] for name in present - {part for parts in self._parts.values() for part in parts}}
        slices = {name: expert_slices(model, name) for name in names}
        self._slices = {name: of_name for name, of_name in slices.items() if of_name}
        self._experts = model.num_experts
        self._interleaved = model.traits.interleaved_experts

    def names(self) -> Sequence[str]:
        """Parameters whose tensors are all there."""
        return list(self._parts)

    def read(self, name: str) -> torch.Tensor:
        """The whole parameter, on the CPU, in the dtype on disk."""
        if name in self._slices:
            return fused_experts.join(self._slices[name], self._experts, self._source.read)
        return self._source.read(self._parts[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        one = self._source.shape(self._parts[name][0])
        slices = self._slices.get(name)
        return one if slices is None else next(iter(slices.values())).fused_shape(one, self._experts)

    def read_flat(self, name: str, start: int, length: int) -> torch.Tensor:
        if self._interleaved and name in self._slices:
            return super().read_flat(name, start, length)
        found, position = [], 0
        for part in self._parts[name]:
            size = math.prod(self._source.shape(part))
            lower, upper = max(start - position, 0), min(start + length - position, size)
            if lower < upper:
                found.append(self._source.read_flat(part, lower, upper - lower))
            position += size
        return torch.cat(found) if found else self._source.read_flat(self._parts[name][0], 0, 0)

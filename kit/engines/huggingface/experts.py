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
from dataclasses import dataclass

import torch

from kit.engines.base import TensorSource
from kit.engines.huggingface import fused_experts
from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class _Names:
    """One family's names on disk, below ``model.layers.N.``."""

    block: str
    gate: str
    up: str
    down: str


_QWEN2_MOE = _Names("mlp", "gate_proj", "up_proj", "down_proj")
_NAMES = {
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _QWEN2_MOE,
    "deepseek_v2": _QWEN2_MOE,
    "deepseek_v3": _QWEN2_MOE,
}


_RENAMED = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Parameters of one tensor that have another name on disk."""


def names_on_disk(model: ModelSpec, name: str) -> list[str]:
    """The tensors on disk of one parameter of transformers: itself, or the matrices of all experts in order."""
    if renamed := _RENAMED.get(model.family, {}).get(name):
        return [renamed]
    if model.traits.interleaved_experts:
        return list(fused_experts.parts(name, model.num_experts)) or [name]
    if model.family not in _NAMES or ".mlp." not in name:
        return [name]
    names = _NAMES[model.family]
    layer, _, rest = name.partition(".mlp.")
    block = f"{layer}.{names.block}"
    matrices = {"experts.gate_up_proj": (names.gate, names.up), "experts.down_proj": (names.down,)}.get(rest)
    if matrices is None:
        return [f"{block}.{rest}"]
    return [f"{block}.experts.{i}.{matrix}.weight" for i in range(model.num_experts) for matrix in matrices]


def shapes_on_disk(model: ModelSpec, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk of one parameter of transformers."""
    names = names_on_disk(model, name)
    if model.traits.interleaved_experts and (parts := fused_experts.parts(name, model.num_experts)):
        return {each: part.shape(shape) for each, part in parts.items()}
    if len(shape) < 3:
        return dict.fromkeys(names, shape)
    experts, rows, columns = shape
    return dict.fromkeys(names, (rows * experts // len(names), columns))


def split_experts(model: ModelSpec, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One parameter (or its gradient or moment) → names on disk and tensors, which are views."""
    names = names_on_disk(model, name)
    if len(names) > 1 and model.traits.interleaved_experts:
        yield from fused_experts.split_fused(name, tensor)
        return
    parts = [tensor] if tensor.ndim < 3 else tensor.flatten(0, 1).chunk(len(names))
    yield from zip(names, parts, strict=True)


class FusedExpertsSource(TensorSource):
    """A ``TensorSource`` with the names of transformers' parameters over one with the names on disk."""

    def __init__(self, model: ModelSpec, source: TensorSource, names: Sequence[str]) -> None:
        """``names``: the parameters of the model; what the source has beyond them is shown as it is."""
        self._source = source
        present = set(source.names())
        wanted = {name: names_on_disk(model, name) for name in names}
        self._parts = {name: parts for name, parts in wanted.items() if present.issuperset(parts)}
        self._parts |= {name: [name] for name in present - {part for parts in self._parts.values() for part in parts}}
        self._rank_three = {name for name, parts in wanted.items() if len(parts) > 1}
        self._experts = model.num_experts
        self._interleaved = model.traits.interleaved_experts

    def names(self) -> Sequence[str]:
        """Parameters whose tensors are all there."""
        return list(self._parts)

    def read(self, name: str) -> torch.Tensor:
        """The whole parameter, on the CPU, in the dtype on disk."""
        if self._interleaved and name in self._rank_three:
            return fused_experts.join(name, self._experts, self._source.read)
        tensors = [self._source.read(part) for part in self._parts[name]]
        if name not in self._rank_three:
            return tensors[0]
        return torch.cat(tensors).unflatten(0, (self._experts, -1))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        parts = [self._source.shape(part) for part in self._parts[name]]
        if name not in self._rank_three:
            return parts[0]
        if self._interleaved:
            return fused_experts.joined_shape(parts[0], self._experts, len(parts) // self._experts)
        return (self._experts, sum(rows for rows, _ in parts) // self._experts, parts[0][1])

    def read_flat(self, name: str, start: int, length: int) -> torch.Tensor:
        if self._interleaved and name in self._rank_three:
            return super().read_flat(name, start, length)
        found, position = [], 0
        for part in self._parts[name]:
            size = math.prod(self._source.shape(part))
            lower, upper = max(start - position, 0), min(start + length - position, size)
            if lower < upper:
                found.append(self._source.read_flat(part, lower, upper - lower))
            position += size
        return torch.cat(found) if found else self._source.read_flat(self._parts[name][0], 0, 0)

"""Maps the experts of transformers' parameters to tensors on disk, and back.

In memory, transformers 5 fuses the experts of a layer into one tensor (``mlp.experts.gate_up_proj``). On disk, on the
Hugging Face Hub and in the files of ``save_pretrained``, each matrix of each expert is a tensor
(transformers/conversion_mapping.py, "mixtral" and "qwen2_moe"). Outside of an engine kit always uses the names on disk,
so checkpoints, Megatron's weight maps and Hugging Face directories agree, and no tensor is larger than a
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kit.engines.huggingface import fused_experts
from kit.engines.huggingface.fused_experts import ExpertSlice
from kit.engines.protocol import TensorSource, rectangles
from kit.specs.model import ModelSpec


def expert_slices(model: ModelSpec, name: str) -> dict[str, ExpertSlice]:
    """Name on disk → slice of transformers' parameter ``name``, for all matrices of all experts.

    Empty if the parameter is one tensor on disk too, and for model types without a family, which keep transformers'
    names and shapes.
    """
    if model.approximate is not None:
        return {}
    if model.traits.interleaved_experts:
        return fused_experts.slices_on_disk(name, model.num_experts, interleaved=True)
    block, gate, up, down = model.traits.mlp_names
    matrices = {"gate_up_proj": (f"{gate}.weight", f"{up}.weight"), "down_proj": (f"{down}.weight",)}
    infix = f".{block}.experts."
    return fused_experts.slices_on_disk(name, model.num_experts, False, matrices=matrices, infix=infix)


def names_on_disk(model: ModelSpec, name: str) -> list[str]:
    """Names on disk of one parameter of transformers: one name, or the names of all experts' matrices in order."""
    if name == "lm_head.weight":
        return [model.traits.head_name]
    return list(expert_slices(model, name)) or [name.replace(".mlp.", f".{model.traits.mlp_names[0]}.", 1)]


def shapes_on_disk(model: ModelSpec, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk of one parameter of transformers."""
    slices = expert_slices(model, name)
    return {each: part.shape(shape) for each, part in slices.items()} or {names_on_disk(model, name)[0]: shape}


def split_experts(model: ModelSpec, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split one parameter, its gradient or its moment into (name on disk, view of ``tensor``)."""
    if slices := expert_slices(model, name):
        yield from ((each, part.of(tensor)) for each, part in slices.items())
    else:
        yield names_on_disk(model, name)[0], tensor


def split_part(
    model: ModelSpec, name: str, shape: tuple[int, ...], starts: tuple[int, ...], part: torch.Tensor
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Split a part of one parameter: (name on disk, whole shape on disk, first index in each dimension, view of
    ``part``). ``shape``: of the whole parameter; ``starts``: of the part, which has whole experts."""
    slices = expert_slices(model, name)
    if not slices:
        yield names_on_disk(model, name)[0], shape, starts, part
    for each, where in slices.items():
        if 0 <= where.expert - starts[0] < len(part):
            own = replace(where, expert=where.expert - starts[0]).of(part)
            yield each, where.shape(shape), (0,) * own.ndim, own


def split_range(
    model: ModelSpec, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor
) -> Iterator[tuple[str, tuple[int, ...], int, int, torch.Tensor]]:
    """Split a range of one flattened parameter: (name on disk, whole shape on disk, first row, first column, matrix,
    which is a view of ``values``). ``shape``: of the whole parameter; ``start``: element at which the range begins."""
    slices, at = expert_slices(model, name), 0
    if slices and model.traits.interleaved_experts:
        inputs = math.prod(shape[1:-1])
        for row, column, part in rectangles(start, values, shape[-1]):
            for each, where in slices.items():
                lower, upper = max(row, where.expert * inputs), min(row + len(part), (where.expert + 1) * inputs)
                first = (where.index - column) % where.count
                own = part[lower - row : max(lower, upper) - row, first :: where.count]
                if own.numel():
                    yield each, where.shape(shape), (column + first) // where.count, lower % inputs, own.t()
        return
    for each, whole in shapes_on_disk(model, name, shape).items():  # which follow each other in the parameter
        lower, upper = max(start, at), min(start + values.numel(), at + math.prod(whole))
        if lower < upper:
            for row, column, part in rectangles(
                lower - at, values[lower - start : upper - start], math.prod(whole[1:])
            ):
                yield each, whole, row, column, part
        at += math.prod(whole)


class FusedExpertsSource(TensorSource):
    """A ``TensorSource`` with transformers' parameter names. Reads from another source, which has the names on disk."""

    def __init__(self, model: ModelSpec, source: TensorSource, names: Sequence[str]) -> None:
        """``names``: the parameters of the model. Further tensors of ``source`` keep their names."""
        self._source = source
        present = set(source.names())
        wanted = {name: names_on_disk(model, name) for name in names}
        self._parts = {name: parts for name, parts in wanted.items() if present.issuperset(parts)}
        self._parts |= {name: [name] for name in present - {part for parts in self._parts.values() for part in parts}}
        slices = {name: expert_slices(model, name) for name in names}
        self._slices = {name: of_name for name, of_name in slices.items() if of_name}
        self._experts = model.num_experts

    def names(self) -> Sequence[str]:
        """Names of the parameters for which the source has all tensors."""
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

    def read_block(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        if name not in self._slices:
            return self._source.read_block(self._parts[name][0], dim, start, length)
        if dim or not length or self._source.collective:
            return super().read_block(name, dim, start, length)
        own = {
            part: replace(where, expert=where.expert - start)
            for part, where in self._slices[name].items()
            if 0 <= where.expert - start < length
        }
        return fused_experts.join(own, length, self._source.read)

    def read_flat(self, name: str, start: int, length: int) -> torch.Tensor:
        if name not in self._slices:
            return self._source.read_flat(self._parts[name][0], start, length)
        experts, *rest = self.shape(name)
        size = math.prod(rest)
        first, end = min(start // size, experts - 1), min(-(-(start + length) // size), experts)
        whole = self.read_block(name, 0, first, max(1, end - first))
        return whole.flatten()[start - first * size :][:length]

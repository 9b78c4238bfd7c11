"""Experts that are stored fused on disk: gpt-oss, where one tensor has a matrix of all experts, gate and up in turns.

Its files and transformers' parameters are the same (modeling_gpt_oss.py, GptOssExperts): (expert, input, output), gate
and up the even and odd outputs. Everywhere else in kit an expert's matrices are tensors of their own, (output, input),
as other families have them on disk: weight maps, exchange checkpoints and expert parallelism then need to know nothing
of it. Each is a view of the fused tensor, so that one function serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_MATRICES = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_proj": ("down_proj.weight",),
    "down_proj_bias": ("down_proj.bias",),
}
_INFIX = ".mlp.experts."


@dataclass(frozen=True)
class ExpertSlice:
    """One matrix or bias of one expert, as part of the fused tensor."""

    expert: int
    first: int
    step: int
    """Outputs ``first``, ``first + step``, …"""

    def of(self, fused: torch.Tensor) -> torch.Tensor:
        """A view: (output, input), or (output)."""
        one = fused[self.expert][..., self.first :: self.step]
        return one.t() if one.ndim == 2 else one

    def shape(self, fused: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the view; ``fused``: shape of the fused tensor."""
        outputs = fused[-1] // self.step
        return (outputs, fused[1]) if len(fused) == 3 else (outputs,)

    def read_block(self, fused: Any, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows (``dim`` 0) or columns (1) of the view; ``fused`` is a slice of a safetensors file, of which no more is
        read."""
        outputs = slice(start * self.step, (start + length) * self.step) if dim == 0 else slice(None)
        if len(fused.get_shape()) == 2:
            return fused[self.expert, outputs][self.first :: self.step]
        inputs = slice(None) if dim == 0 else slice(start, start + length)
        found: torch.Tensor = fused[self.expert, inputs, outputs][:, self.first :: self.step]
        return found.t()


def parts(name: str, experts: int) -> dict[str, ExpertSlice]:
    """Name → part of the fused tensor ``name``, expert by expert; empty for any other tensor."""
    layer, infix, matrix = name.partition(_INFIX)
    if not infix or matrix not in _MATRICES:
        return {}
    names = _MATRICES[matrix]
    return {
        f"{layer}{_INFIX}{expert}.{each}": ExpertSlice(expert, index, len(names))
        for expert in range(experts)
        for index, each in enumerate(names)
    }


def split_fused(name: str, fused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view) of all parts."""
    yield from ((each, part.of(fused)) for each, part in parts(name, fused.shape[0]).items())


def join(name: str, experts: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The fused tensor (expert, input, output), from the tensors that ``read`` returns by name."""
    fused = torch.empty(0)
    for number, (each, part) in enumerate(parts(name, experts).items()):
        value = read(each)
        if number == 0:
            fused = torch.empty(joined_shape(tuple(value.shape), experts, part.step), dtype=value.dtype)
        part.of(fused).copy_(value)
    return fused


def joined_shape(one: tuple[int, ...], experts: int, step: int) -> tuple[int, ...]:
    """Shape of the fused tensor whose parts have the shape ``one``."""
    return (experts, *one[1:], one[0] * step)

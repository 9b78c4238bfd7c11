"""Experts that are stored fused on disk: gpt-oss, where one tensor has a matrix of all experts, gate and up in turns.

Its files and transformers' parameters are the same (modeling_gpt_oss.py, GptOssExperts): (expert, input, output), gate
and up the even and odd outputs. Everywhere else in kit an expert's matrices are tensors of their own, (output, input),
as other families have them on disk: weight maps, exchange checkpoints and expert parallelism then need to know nothing
of it. Each is a view of the fused tensor, so that one function serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """One matrix or bias of one expert, as part of the tensor that holds those of all experts."""

    expert: int
    index: int
    count: int
    """It is number ``index`` of the ``count`` that the tensor has of each expert."""
    interleaved: bool
    """True: (expert, input, output), and the outputs of the ``count`` take turns. False: (expert, output, input), and
    they lie one after the other."""

    def of(self, fused: torch.Tensor) -> torch.Tensor:
        """A view: (output, input), or (output) of a bias."""
        one = fused[self.expert]
        if not self.interleaved:
            return one.chunk(self.count)[self.index]
        one = one[..., self.index :: self.count]
        return one.t() if one.ndim == 2 else one

    def shape(self, fused: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the view; ``fused``: shape of the fused tensor."""
        if not self.interleaved:
            return (fused[1] // self.count, fused[2])
        return (fused[-1] // self.count, *fused[1:-1])

    def fused_shape(self, one: tuple[int, ...], experts: int) -> tuple[int, ...]:
        """Shape of the fused tensor of which this is a part of the shape ``one``."""
        if not self.interleaved:
            return (experts, one[0] * self.count, one[1])
        return (experts, *one[1:], one[0] * self.count)

    def read_block(self, fused: Any, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows (``dim`` 0) or columns (1) of the view of an interleaved tensor; ``fused`` is a slice of a safetensors
        file, of which no more is read."""
        outputs = slice(start * self.count, (start + length) * self.count) if dim == 0 else slice(None)
        if len(fused.get_shape()) == 2:
            return fused[self.expert, outputs][self.index :: self.count]
        inputs = slice(None) if dim == 0 else slice(start, start + length)
        return fused[self.expert, inputs, outputs][:, self.index :: self.count].t()


def interleaved_slices(name: str, experts: int) -> dict[str, ExpertSlice]:
    """Name → part of the fused tensor ``name``, expert by expert; empty for any other tensor."""
    layer, infix, matrix = name.partition(_INFIX)
    names = _MATRICES.get(matrix, ()) if infix else ()
    return {
        f"{layer}{_INFIX}{expert}.{each}": ExpertSlice(expert, index, len(names), interleaved=True)
        for expert in range(experts)
        for index, each in enumerate(names)
    }


def join(slices: Mapping[str, ExpertSlice], experts: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The fused tensor, from the tensors that ``read`` returns by name, in their dtype."""
    fused: torch.Tensor | None = None
    for name, part in slices.items():
        value = read(name)
        if fused is None:
            fused = torch.empty(part.fused_shape(tuple(value.shape), experts), dtype=value.dtype)
        part.of(fused).copy_(value)
    assert fused is not None
    return fused

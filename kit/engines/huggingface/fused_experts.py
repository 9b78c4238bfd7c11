"""Slices of tensors that contain all experts of a layer; gpt-oss and Qwen3-VL store such fused tensors on disk.

gpt-oss has equal shapes on disk and in transformers (modeling_gpt_oss.py, GptOssExperts): (expert, input, output), with
gate in the even outputs and up in the odd ones. Qwen3-VL's text part has gate before up, and the outputs last on the
hub, but not where transformers has saved it again (conversion_mapping.py, "qwen3_vl_moe"). The rest of kit uses one
tensor (output, input) per matrix and expert, as other families have on disk. So weight maps, checkpoints and expert
parallelism need no special case. Each slice is a view of the fused tensor, so it serves to read and to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    """One matrix or bias of one expert, as a slice of the fused tensor of all experts."""

    expert: int
    index: int
    count: int
    """Number of matrices per expert in the fused tensor; this is matrix number ``index``."""
    interleaved: bool
    """True: the fused tensor is (expert, input, output), and output i belongs to matrix i modulo ``count``. False: it
    is (expert, output, input), and the matrices are concatenated along the outputs."""
    transposed: bool = False
    """Not interleaved, and the fused tensor is (expert, input, output)."""

    @property
    def _inputs_first(self) -> bool:
        return self.interleaved or self.transposed

    def of(self, fused: torch.Tensor) -> torch.Tensor:
        """A view of ``fused``: (output, input), or (output) for a bias."""
        one = fused[self.expert]
        if one.ndim == 2 and self._inputs_first:
            one = one.t()
        return one[self.index :: self.count] if self.interleaved else one.chunk(self.count)[self.index]

    def shape(self, fused: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the view; ``fused``: shape of the fused tensor."""
        outputs, *inputs = fused[:0:-1] if self._inputs_first else fused[1:]
        return (outputs // self.count, *inputs)

    def fused_shape(self, one: tuple[int, ...], experts: int) -> tuple[int, ...]:
        """Shape of the fused tensor of ``experts`` experts, if the view has shape ``one``."""
        if not self.interleaved:
            return (experts, one[0] * self.count, one[1])
        return (experts, *one[1:], one[0] * self.count)


def slices_on_disk(
    name: str,
    experts: int,
    interleaved: bool,
    transposed: bool = False,
    matrices: Mapping[str, tuple[str, ...]] = _MATRICES,
    infix: str = _INFIX,
) -> dict[str, ExpertSlice]:
    """Name of a matrix → its slice of the fused tensor ``name``, for all experts; empty for other tensors.

    ``matrices``: end of a fused tensor's name → ends of the matrices' names. ``infix``: what stands in these names
    before the expert's number."""
    layer, _, fused = name.partition(_INFIX)
    names = matrices.get(fused, ())
    return {
        f"{layer}{infix}{expert}.{each}": ExpertSlice(expert, index, len(names), interleaved, transposed)
        for expert in range(experts)
        for index, each in enumerate(names)
    }


def join(slices: Mapping[str, ExpertSlice], experts: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Build the fused tensor. ``read``: name → tensor (a view's shape); the result has these tensors' dtype."""
    fused: torch.Tensor | None = None
    for name, part in slices.items():
        value = read(name)
        if fused is None:
            fused = torch.empty(part.fused_shape(tuple(value.shape), experts), dtype=value.dtype)
        part.of(fused).copy_(value)
    assert fused is not None
    return fused

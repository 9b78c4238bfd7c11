"""AdamW and Lion with 8-bit moments: one byte per value, and one fp32 scale per block (arXiv 2110.02861).

bitsandbytes computes the step, on CUDA in one kernel. This module does not use its optimizer class, which does not
support DTensor, waits for the device after every parameter (optim/optimizer.py, Optimizer8bit.step), and creates its
state in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from kit.engines.base import StateKind
from kit.engines.torch.fsdp import local_shard
from kit.errors import EngineError
from kit.specs.job import OptimizerSpec
from kit.specs.optimizers import BLOCK, OPTIMIZERS

MOST_ELEMENTS = 2**31 - 1
"""Largest tensor on a rank: the kernel counts in 32 bits (bitsandbytes/backends/cuda/ops.py)."""


@dataclass(frozen=True)
class EightBitMoment:
    """One moment of one rank's slice of a matrix: value = table[code] · scale of the block."""

    codes: torch.Tensor
    """Index into the table for each value: uint8, of the slice's shape."""
    scales: torch.Tensor
    """fp32: the largest magnitude of each block of the flattened slice."""
    signed: bool
    """Whether values may be negative. False for the second moment, whose table begins at 0."""

    @property
    def table(self) -> torch.Tensor:
        """fp32, 256 entries from -1 or 0 to 1, densest around 0."""
        return _table(self.signed, self.codes.device)

    def read(self) -> torch.Tensor:
        """The values: an fp32 tensor of the slice's shape."""
        import bitsandbytes.functional as F

        if not self.codes.numel():
            return torch.empty(self.codes.shape, device=self.codes.device)
        return F.dequantize_blockwise(self.codes, absmax=self.scales, code=self.table, blocksize=BLOCK)

    def write(self, values: torch.Tensor) -> None:
        """Quantise and store ``values``, fp32 of the slice's shape, with the rounding of the optimizer's step."""
        import bitsandbytes.functional as F

        if values.numel():
            codes, state = F.quantize_blockwise(values.contiguous(), code=self.table, blocksize=BLOCK)
            self.codes.copy_(codes)
            self.scales.copy_(state.absmax)


class EightBitOptimizer:
    """Steps matrices. Vectors (norms, biases) are small and have moments in fp32.

    Each rank splits its own slice into blocks. If the slice's size is not a multiple of ``BLOCK``, rounding differs a
    little between layouts.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec) -> None:
        """``parameters``: matrices, fp32. Raises EngineError if bitsandbytes is missing, or if a rank's slice has more
        than ``MOST_ELEMENTS``."""
        require_bitsandbytes(spec.name)
        self._parameters, self._spec = list(parameters), spec
        self.moments: dict[torch.nn.Parameter, Mapping[StateKind, EightBitMoment]] = {}
        for parameter in self._parameters:
            local = local_shard(parameter.detach())
            if local.numel() > MOST_ELEMENTS:
                raise EngineError(
                    f"optimizer.name={spec.name} and a tensor of {local.numel()} elements on a rank: its kernel counts "
                    f"to {MOST_ELEMENTS}; shard over more ranks, or use {spec.name.removesuffix('-8bit')}"
                )
            self.moments[parameter] = {
                kind: EightBitMoment(
                    codes=torch.zeros(local.shape, dtype=torch.uint8, device=local.device),
                    # A scale of zero makes every value zero, as moments are at the start.
                    scales=torch.zeros(-(-local.numel() // BLOCK), device=local.device),
                    signed=kind is StateKind.EXP_AVG,
                )
                for kind in map(StateKind, OPTIMIZERS[spec.name].state)
            }

    @torch.no_grad()
    def step(self, steps: int, learning_rate: float, of_short: torch.Tensor | None = None) -> None:
        """Step all matrices; not collective, does not wait for the device. ``steps``: number of this step, from 1.

        The kernel takes 16-bit gradients as fp32 copies; ``of_short`` multiplies these copies.
        """
        import bitsandbytes.functional as F

        for parameter in self._parameters:
            if parameter.grad is None or not (weight := local_shard(parameter.detach())).numel():
                continue
            moments = self.moments[parameter]
            first, second = moments[StateKind.EXP_AVG], moments.get(StateKind.EXP_AVG_SQ)
            assert weight.is_contiguous()
            gradient = local_shard(parameter.grad).contiguous()
            if gradient.dtype is not torch.float32:
                gradient = gradient.float() if of_short is None else gradient.float().mul_(of_short)
            F.optimizer_update_8bit_blockwise(
                "lion" if second is None else "adam",
                gradient,
                weight,
                first.codes,
                None if second is None else second.codes,
                self._spec.beta1,
                self._spec.beta2,
                0.0,
                0.0,
                self._spec.eps,
                steps,
                learning_rate,
                first.table,
                None if second is None else second.table,
                first.scales,
                None if second is None else second.scales,
                self._spec.weight_decay,
            )


def require_bitsandbytes(optimizer: str) -> None:
    """Raises EngineError if bitsandbytes is missing."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise EngineError(
            f"optimizer.name={optimizer} needs bitsandbytes; install it with: pip install 'kit[eight-bit]'"
        ) from error


@lru_cache
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    """Built on first use, because the memory probe's tensors have no values."""
    import bitsandbytes.functional as F

    return F.create_dynamic_map(signed=signed).to(device)

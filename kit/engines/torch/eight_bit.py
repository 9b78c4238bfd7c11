"""AdamW whose moments are held in 8 bits: a byte and a share of a block's scale each (arXiv 2110.02861).

bitsandbytes does the arithmetic, on CUDA in one kernel. Its optimizer class is not used: it knows no DTensor, waits for
the device after every parameter (optim/optimizer.py, Optimizer8bit.step), and makes its state at the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from kit.cost.memory.states import BLOCK
from kit.engines.base import StateKind
from kit.engines.torch.fsdp import local_shard
from kit.errors import EngineError
from kit.specs.job import OptimizerSpec

MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
MOST_ELEMENTS = 2**31 - 1
"""Largest tensor on a rank: the kernel counts in 32 bits (bitsandbytes/backends/cuda/ops.py)."""


@dataclass(frozen=True)
class EightBitMoment:
    """One moment of one rank's slice of a matrix: a value is its code's entry of the table times its block's scale."""

    codes: torch.Tensor
    """uint8, of the slice's shape."""
    scales: torch.Tensor
    """fp32: the largest magnitude of each block of the flattened slice."""
    signed: bool
    """The second moment has no sign: its table begins at 0."""

    @property
    def table(self) -> torch.Tensor:
        """fp32, 256 entries from -1 or 0 to 1, closest to each other around 0."""
        return _table(self.signed, self.codes.device)

    def read(self) -> torch.Tensor:
        """The values: an fp32 copy of the slice's shape."""
        import bitsandbytes.functional as F

        if not self.codes.numel():
            return torch.empty(self.codes.shape, device=self.codes.device)
        return F.dequantize_blockwise(self.codes, absmax=self.scales, code=self.table, blocksize=BLOCK)

    def write(self, values: torch.Tensor) -> None:
        """Round ``values``, fp32 of the slice's shape, as the optimizer's step does."""
        import bitsandbytes.functional as F

        if values.numel():
            codes, state = F.quantize_blockwise(values.contiguous(), code=self.table, blocksize=BLOCK)
            self.codes.copy_(codes)
            self.scales.copy_(state.absmax)


class EightBitAdamW:
    """Steps matrices; vectors (norms, biases) are few and stay with torch's AdamW.

    Blocks are in what a rank holds of a matrix: where its size is not a multiple of ``BLOCK``, another layout rounds a
    little differently.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec) -> None:
        """``parameters``: matrices, fp32. Raises EngineError where bitsandbytes is missing, or for one too large."""
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise EngineError(
                "optimizer.name=adamw-8bit needs bitsandbytes; install it with: pip install 'kit[eight-bit]'"
            ) from error
        self._parameters, self._spec = list(parameters), spec
        self.moments: dict[torch.nn.Parameter, Mapping[StateKind, EightBitMoment]] = {}
        for parameter in self._parameters:
            local = local_shard(parameter.detach())
            if local.numel() > MOST_ELEMENTS:
                raise EngineError(
                    f"optimizer.name=adamw-8bit and a tensor of {local.numel()} elements on a rank: its kernel counts "
                    f"to {MOST_ELEMENTS}; shard over more ranks, or use adamw"
                )
            self.moments[parameter] = {
                kind: EightBitMoment(
                    codes=torch.zeros(local.shape, dtype=torch.uint8, device=local.device),
                    # With a scale of zero every code is a zero, as the moments of a start are.
                    scales=torch.zeros(-(-local.numel() // BLOCK), device=local.device),
                    signed=kind is StateKind.EXP_AVG,
                )
                for kind in MOMENTS
            }

    @torch.no_grad()
    def step(self, steps: int, learning_rate: float, of_short: torch.Tensor | None = None) -> None:
        """No collective, no wait for the device. ``steps``: number of this one, from 1. Gradients in 16 bits are taken
        as fp32 copies, which the kernel wants, multiplied with ``of_short``."""
        import bitsandbytes.functional as F

        for parameter in self._parameters:
            if parameter.grad is None or not (weight := local_shard(parameter.detach())).numel():
                continue
            first, second = (self.moments[parameter][kind] for kind in MOMENTS)
            assert weight.is_contiguous()
            gradient = local_shard(parameter.grad).contiguous()
            if gradient.dtype is not torch.float32:
                gradient = gradient.float() if of_short is None else gradient.float().mul_(of_short)
            F.optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                weight,
                first.codes,
                second.codes,
                self._spec.beta1,
                self._spec.beta2,
                0.0,
                0.0,
                self._spec.eps,
                steps,
                learning_rate,
                first.table,
                second.table,
                first.scales,
                second.scales,
                self._spec.weight_decay,
            )


@lru_cache
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    """Made when it is first read: the probe of memory holds tensors that have no values."""
    import bitsandbytes.functional as F

    return F.create_dynamic_map(signed=signed).to(device)

"""AdamW and Lion with 8-bit moments: one byte per value, and one fp32 scale per block (arXiv 2110.02861).

bitsandbytes computes the step, on CUDA in one kernel. kit does not use its optimizer classes: they do not support
DTensor, wait for the device after every parameter (optim/optimizer.py, Optimizer8bit.step), create their state in the
first step, and keep norms in 8 bits where ZeRO flattens many of them into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from kit.engines.protocol import StateKind
from kit.errors import EngineError
from kit.extras import install
from kit.specs.job import OptimizerSpec
from kit.specs.optimizers import BLOCK

PIECE = 2**24
"""Most elements of a call: bitsandbytes' kernels count in 32 bits (backends/cuda/ops.py), and ZeRO's flat partitions
are larger, 4 billion elements for 8B parameters on two GPUs. Whole blocks, so that no number changes; 64 MiB in
fp32."""


@dataclass(frozen=True)
class EightBitMoment:
    """One moment of one rank's slice of a matrix, or of several matrices: value = table[code] · scale of the block."""

    codes: torch.Tensor
    """Index into the table for each value: uint8, of the slice's shape, contiguous."""
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

        values = torch.empty(self.codes.shape, device=self.codes.device)
        for part, blocks in _pieces(values.numel()):
            codes, scales = self.codes.view(-1)[part], self.scales[blocks]
            values.view(-1)[part] = F.dequantize_blockwise(codes, absmax=scales, code=self.table, blocksize=BLOCK)
        return values

    def write(self, values: torch.Tensor) -> None:
        """Quantise and store ``values``, fp32 of the slice's shape, with the rounding of the optimizer's step."""
        import bitsandbytes.functional as F

        for part, blocks in _pieces(values.numel()):
            codes, state = F.quantize_blockwise(values.reshape(-1)[part], code=self.table, blocksize=BLOCK)
            self.codes.view(-1)[part].copy_(codes)
            self.scales[blocks].copy_(state.absmax)


def zero_moment(kind: StateKind, like: torch.Tensor) -> EightBitMoment:
    """A moment of zeros: a scale of zero makes every value zero."""
    return EightBitMoment(
        codes=torch.zeros(like.shape, dtype=torch.uint8, device=like.device),
        scales=torch.zeros(-(-like.numel() // BLOCK), device=like.device),
        signed=kind is StateKind.EXP_AVG,
    )


def step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: Mapping[StateKind, EightBitMoment],
    spec: OptimizerSpec,
    steps: int,
    learning_rate: float,
    stochastic: bool = False,
) -> None:
    """Step one slice with weight decay; does not wait for the device. ``weight``: fp32 or bf16, of which pieces are
    stepped in fp32; ``gradient``: fp32; both contiguous. ``steps``: number of this step, from 1. ``stochastic``: how a
    new weight is rounded to bf16."""
    import bitsandbytes.functional as F

    first, second = moments[StateKind.EXP_AVG], moments.get(StateKind.EXP_AVG_SQ)
    for part, blocks in _pieces(weight.numel()):
        own = weight.view(-1)[part]
        master = own.float()
        F.optimizer_update_8bit_blockwise(
            "lion" if second is None else "adam",
            gradient.view(-1)[part],
            master,
            first.codes.view(-1)[part],
            None if second is None else second.codes.view(-1)[part],
            spec.beta1,
            spec.beta2,
            0.0,
            0.0,
            spec.eps,
            steps,
            learning_rate,
            first.table,
            None if second is None else second.table,
            first.scales[blocks],
            None if second is None else second.scales[blocks],
            spec.weight_decay,
        )
        if own.dtype is not torch.float32:
            own.copy_(stochastically_rounded(master) if stochastic else master)


def stochastically_rounded(values: torch.Tensor) -> torch.Tensor:
    """fp32 as bf16, up or down with the probabilities that keep the mean, by torch's generator of the device."""
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    return _fp32_to_bf16_sr(values)


def require_bitsandbytes(optimizer: str) -> None:
    """Raises EngineError if bitsandbytes is missing."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise EngineError(
            f"optimizer.name={optimizer} needs bitsandbytes; install it with: {install('eight-bit')}"
        ) from error


def _pieces(elements: int) -> Iterator[tuple[slice, slice]]:
    """(elements, blocks) of each call."""
    for start in range(0, elements, PIECE):
        end = min(elements, start + PIECE)
        yield slice(start, end), slice(start // BLOCK, -(-end // BLOCK))


@lru_cache
def _table(signed: bool, device: torch.device) -> torch.Tensor:
    """Built on first use, because the memory probe's tensors have no values."""
    import bitsandbytes.functional as F

    return F.create_dynamic_map(signed=signed).to(device)

"""Steps the matrices of the torch engine with 8-bit moments (``kit.engines.eight_bit``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kit.engines import eight_bit
from kit.engines.protocol import StateKind
from kit.engines.torch.fsdp import local_shard
from kit.specs.job import OptimizerSpec


class EightBitOptimizer:
    """Steps matrices. Vectors (norms, biases) are small and have moments in fp32.

    Each rank splits its own slice into blocks. If the slice's size is not a multiple of ``BLOCK``, rounding differs a
    little between layouts.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec, stochastic: bool = False) -> None:
        """``parameters``: matrices, fp32 or bf16. ``stochastic``: how new weights are rounded to bf16. Raises
        EngineError if bitsandbytes is missing."""
        eight_bit.require_bitsandbytes(spec.name)
        self._parameters, self._spec, self._stochastic = list(parameters), spec, stochastic
        self.moments: dict[torch.nn.Parameter, Mapping[StateKind, eight_bit.EightBitMoment]] = {
            parameter: {
                kind: eight_bit.zero_moment(kind, local_shard(parameter.detach())) for kind in eight_bit.kinds_of(spec)
            }
            for parameter in self._parameters
        }

    @torch.no_grad()
    def step(self, steps: int, learning_rate: float, of_short: torch.Tensor | None = None) -> None:
        """Step all matrices; not collective, does not wait for the device. ``steps``: number of this step, from 1.

        The kernel takes 16-bit gradients as fp32 copies; ``of_short`` multiplies these copies.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            weight = local_shard(parameter.detach())
            assert weight.is_contiguous()
            gradient = local_shard(parameter.grad).contiguous()
            if gradient.dtype is not torch.float32:
                gradient = gradient.float() if of_short is None else gradient.float().mul_(of_short)
            moments = self.moments[parameter]
            eight_bit.step(weight, gradient, moments, self._spec, steps, learning_rate, self._stochastic)

"""Steps matrices with 8-bit moments (``kit.engines.eight_bit``)."""

from __future__ import annotations

from typing import Any

import torch

from kit.engines import eight_bit
from kit.engines.protocol import StateKind
from kit.engines.torch.fsdp import local_shard
from kit.specs.job import OptimizerSpec
from kit.specs.optimizers import OPTIMIZERS

CODES, SCALES = "_codes", "_scales"


class EightBit(torch.optim.Optimizer):
    """Steps matrices, or flat partitions of them. Vectors (norms, biases) are small and have moments in fp32.

    Each rank splits its own slice into blocks. If the slice's size is not a multiple of ``BLOCK``, rounding differs a
    little between layouts. ``state``: ``step``, and for each moment ``exp_avg_codes`` and ``exp_avg_scales``.
    """

    of_short: torch.Tensor | None = None
    """Multiplies the fp32 copies that the kernel takes of 16-bit gradients: the clipping factor."""

    def __init__(
        self, groups: list[dict[str, Any]], spec: OptimizerSpec, learning_rate: float, stochastic: bool = False
    ) -> None:
        """``stochastic``: how new weights are rounded to bf16. Raises EngineError if bitsandbytes is missing."""
        eight_bit.require_bitsandbytes(spec.name)
        self.kinds = tuple(map(StateKind, OPTIMIZERS[spec.name].state))
        self._spec, self._stochastic = spec, stochastic
        super().__init__(groups, {"lr": learning_rate, "weight_decay": spec.weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Step all tensors that have a gradient; not collective, does not wait for the device."""
        assert closure is None
        for group in self.param_groups:
            for tensor in group["params"] if group.get("eight_bit", True) else ():
                moments, state, weight = self.moments(tensor), self.state[tensor], local_shard(tensor.detach())
                state["step"] += 1  # counts steps of the run, not of the tensor
                if tensor.grad is None:
                    continue
                assert weight.is_contiguous()
                gradient = local_shard(tensor.grad).contiguous()
                if gradient.dtype is not torch.float32:
                    gradient = gradient.float() if self.of_short is None else gradient.float().mul_(self.of_short)
                steps = int(state["step"])
                eight_bit.step(weight, gradient, moments, self._spec, steps, group["lr"], self._stochastic)

    def moments(self, tensor: torch.Tensor) -> dict[StateKind, eight_bit.EightBitMoment]:
        """The moments of a tensor, or of its slice on this rank; zeros if there were none."""
        state = self.state[tensor]
        for kind in self.kinds:
            if kind.value + CODES not in state:
                zero = eight_bit.zero_moment(kind, local_shard(tensor.detach()))
                state[kind.value + CODES], state[kind.value + SCALES] = zero.codes, zero.scales
        if "step" not in state:
            state["step"] = torch.zeros(())
        return moments_of(state)


def moments_of(state: dict[str, Any]) -> dict[StateKind, eight_bit.EightBitMoment]:
    """The 8-bit moments in the state of a tensor; none of a tensor that has them in fp32."""
    return {
        kind: eight_bit.EightBitMoment(
            state[kind.value + CODES], state[kind.value + SCALES], signed=kind is StateKind.EXP_AVG
        )
        for kind in StateKind
        if kind.value + CODES in state
    }

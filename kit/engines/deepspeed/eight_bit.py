"""AdamW and Lion with 8-bit moments under DeepSpeed, which has none: a client optimizer (engine.py,
_configure_optimizer).

ZeRO replaces the parameters of each group by flat fp32 partitions, so blocks are those of a partition, as in
bitsandbytes' own optimizers under ZeRO. Stage 0 steps whole matrices.
"""

from __future__ import annotations

from typing import Any

import torch

from kit.engines import eight_bit
from kit.engines.protocol import StateKind
from kit.engines.torch.lion import Lion
from kit.specs.job import OptimizerSpec

_CODES, _SCALES = "_codes", "_scales"


class EightBit(torch.optim.Optimizer):
    """Steps the first group with 8-bit moments, and the second, of vectors, with fp32 moments by ``torch.optim.AdamW``
    or bitsandbytes' Lion.

    ``state`` of a tensor of the first group: ``step``, and for each moment ``exp_avg_codes`` and ``exp_avg_scales``
    (``kit.engines.eight_bit``). Between ``open`` and ``close`` it has ``exp_avg`` in fp32 too.
    """

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, learning_rate: float) -> None:
        """``groups``: matrices, and vectors. Raises EngineError if bitsandbytes is missing."""
        eight_bit.require_bitsandbytes(spec.name)
        matrices, vectors = groups
        self.kinds, self._spec = eight_bit.kinds_of(spec), spec
        self._vectors: torch.optim.Optimizer = (
            Lion([vectors], spec, learning_rate)
            if spec.name == "lion-8bit"
            else torch.optim.AdamW([vectors], learning_rate, (spec.beta1, spec.beta2), spec.eps)
        )
        of_vectors = self._vectors.param_groups[0]
        super().__init__(
            [{**matrices, "eight_bit": True}, {**of_vectors, "eight_bit": False}],
            {"lr": learning_rate, "weight_decay": spec.weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Step all tensors that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for tensor in group["params"] if group["eight_bit"] else ():
                if tensor.grad is None:
                    continue
                moments = self._moments(tensor)
                state = self.state[tensor]
                state["step"] = state.get("step", 0) + 1
                gradient = tensor.grad.contiguous()
                eight_bit.step(tensor.detach(), gradient, moments, self._spec, state["step"], group["lr"])
        # ZeRO sets the groups' parameters anew, and loading makes new groups.
        self._vectors.param_groups = [group for group in self.param_groups if not group["eight_bit"]]
        self._vectors.state = self.state
        self._vectors.step()

    def open(self, kind: StateKind) -> None:
        """Make a copy of each 8-bit moment of a kind in fp32, by the kind's name in ``state``."""
        for tensor, state in self.state.items():
            if kind.value + _CODES in state:
                state[kind.value] = self._moments(tensor)[kind].read()

    def close(self, store: bool) -> None:
        """Remove the copies of ``open``; ``store``: quantise them first."""
        for tensor, state in self.state.items():
            for kind in self.kinds if self.kinds[0].value + _CODES in state else ():
                values = state.pop(kind.value, None)
                if store and values is not None:
                    self._moments(tensor)[kind].write(values)

    def _moments(self, tensor: torch.Tensor) -> dict[StateKind, eight_bit.EightBitMoment]:
        """The moments of a tensor of the first group; zeros if there were none."""
        state = self.state[tensor]
        for kind in self.kinds:
            if kind.value + _CODES not in state:
                zero = eight_bit.zero_moment(kind, tensor)
                state[kind.value + _CODES], state[kind.value + _SCALES] = zero.codes, zero.scales
        return {
            kind: eight_bit.EightBitMoment(
                state[kind.value + _CODES], state[kind.value + _SCALES], signed=kind is StateKind.EXP_AVG
            )
            for kind in self.kinds
        }

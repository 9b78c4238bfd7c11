"""Steps matrices with bitsandbytes' own PagedAdamW8bit: CUDA moves 8-bit moments to the host when memory runs out."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from kit.engines.protocol import StateKind
from kit.engines.torch.eight_bit import CODES, SCALES, EightBit
from kit.specs.job import OptimizerSpec


class Paged(EightBit):
    """Steps whole matrices (bitsandbytes' class does not support DTensor), whose gradients a rule keeps in fp32."""

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, *others: Any) -> None:
        """Arguments and errors are those of ``EightBit``."""
        super().__init__(groups, spec, *others)
        from bitsandbytes.optim.adamw import PagedAdamW8bit

        betas, parameters = (spec.beta1, spec.beta2), self.param_groups[0]["params"]
        self._inner = PagedAdamW8bit(
            parameters, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay, min_8bit_size=0
        )
        for index, parameter in enumerate(parameters):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")  # nothing to page
                self._inner.init_state(self._inner.param_groups[0], parameter, 0, index)
            state = self._inner.state[parameter]
            for kind, number in ((StateKind.EXP_AVG, 1), (StateKind.EXP_AVG_SQ, 2)):
                codes, scales = state[f"state{number}"], state[f"absmax{number}"]
                self.state[parameter] |= {kind.value + CODES: codes, kind.value + SCALES: scales}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Step all matrices that have a gradient; waits for the device after each."""
        assert closure is None
        self._inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for parameter, state in self.state.items():
            self._inner.state[parameter]["step"] = int(state["step"])  # the class counts on from it
            state["step"] += 1
        self._inner.step()

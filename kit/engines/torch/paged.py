"""Steps matrices with bitsandbytes' own PagedAdamW8bit: CUDA moves 8-bit moments to the host when memory runs out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from kit.engines import eight_bit
from kit.engines.protocol import StateKind
from kit.specs.job import OptimizerSpec


class PagedOptimizer:
    """Steps whole matrices (bitsandbytes' class does not support DTensor), as ``EightBitOptimizer`` does."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec) -> None:
        """``parameters``: matrices, fp32. Raises EngineError if bitsandbytes is missing."""
        eight_bit.require_bitsandbytes(spec.name)
        from bitsandbytes.optim.adamw import PagedAdamW8bit

        betas = (spec.beta1, spec.beta2)
        self._optimizer = PagedAdamW8bit(
            parameters, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay, min_8bit_size=0
        )
        self.moments: dict[torch.nn.Parameter, Mapping[StateKind, eight_bit.EightBitMoment]] = {}
        (group,) = self._optimizer.param_groups
        for index, parameter in enumerate(parameters):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")  # nothing to page
                self._optimizer.init_state(group, parameter, 0, index)
            state = self._optimizer.state[parameter]
            self.moments[parameter] = {
                StateKind.EXP_AVG: eight_bit.EightBitMoment(state["state1"], state["absmax1"], signed=True),
                StateKind.EXP_AVG_SQ: eight_bit.EightBitMoment(state["state2"], state["absmax2"], signed=False),
            }

    def step(self, steps: int, learning_rate: float, of_short: torch.Tensor | None = None) -> None:
        """Step all matrices that have a gradient; waits for the device after each. ``steps``: number of this step.
        ``of_short``: not read, for a rule refuses gradients in 16 bits."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for state in self._optimizer.state.values():
            state["step"] = steps - 1  # the class counts on from it
        self._optimizer.step()

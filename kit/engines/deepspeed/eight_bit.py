"""AdamW and Lion with 8-bit moments under DeepSpeed, which has none: a client optimizer (engine.py,
_configure_optimizer).

ZeRO replaces the parameters of each group by flat fp32 partitions, so blocks are those of a partition, as in
bitsandbytes' own optimizers under ZeRO. Stage 0 steps whole matrices.
"""

from __future__ import annotations

from typing import Any

import torch

from kit.engines.torch.eight_bit import EightBit
from kit.engines.torch.lion import Lion
from kit.specs.job import OptimizerSpec


class EightBitAndVectors(EightBit):
    """Steps the first group with 8-bit moments, and the second, of vectors, with fp32 moments by ``torch.optim.AdamW``
    or bitsandbytes' Lion."""

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, learning_rate: float) -> None:
        """``groups``: matrices, and vectors. Raises EngineError if bitsandbytes is missing."""
        matrices, vectors = groups
        self._vectors: torch.optim.Optimizer = (
            Lion([vectors], spec, learning_rate)
            if spec.name == "lion-8bit"
            else torch.optim.AdamW([vectors], learning_rate, (spec.beta1, spec.beta2), spec.eps)
        )
        of_vectors = self._vectors.param_groups[0]
        both = [{**matrices, "eight_bit": True}, {**of_vectors, "eight_bit": False}]
        super().__init__(both, spec, learning_rate)

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Step all tensors that have a gradient."""
        super().step(closure)
        # ZeRO sets the groups' parameters anew, and loading makes new groups.
        self._vectors.param_groups = [group for group in self.param_groups if not group["eight_bit"]]
        self._vectors.state = self.state
        self._vectors.step()

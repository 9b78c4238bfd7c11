"""Lion (arXiv 2302.06675) by bitsandbytes' kernel, on this rank's slices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from kit.engines.eight_bit import require_bitsandbytes
from kit.engines.protocol import StateKind
from kit.engines.torch.fsdp import local_shard
from kit.specs.job import OptimizerSpec


class Lion(torch.optim.Optimizer):
    """Steps with bitsandbytes' 32-bit Lion. ``state``: exp_avg, zeros if the caller has created none.

    bitsandbytes' optimizer class does not support DTensor, and waits for the device after every parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, learning_rate: float) -> None:
        """Raises EngineError if bitsandbytes is missing."""
        require_bitsandbytes(spec.name)
        super().__init__(groups, {"lr": learning_rate, "betas": (spec.beta1, spec.beta2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Step all parameters that have a gradient; not collective."""
        import bitsandbytes.functional as F

        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not (weight := local_shard(parameter)).numel():
                    continue
                if StateKind.EXP_AVG.value not in self.state[parameter]:
                    self.state[parameter][StateKind.EXP_AVG.value] = torch.zeros_like(parameter)
                # Not by the kernel: weight decay is decoupled, and bitsandbytes' kernels differ in that.
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                # On a CPU the kernel is Python code, which bitsandbytes would compile: 10 s, for equal numbers.
                with torch.compiler.set_stance("force_eager") if weight.device.type == "cpu" else nullcontext():
                    F.optimizer_update_32bit(
                        "lion",
                        local_shard(parameter.grad).contiguous(),
                        weight,
                        local_shard(self.state[parameter]["exp_avg"]),
                        group["betas"][0],
                        0.0,
                        1,
                        group["lr"],
                        beta2=group["betas"][1],
                    )

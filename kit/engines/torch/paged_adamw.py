"""AdamW by bitsandbytes' kernel, on this rank's slices of matrices, with paged moments (``kit.engines.paged``)."""

from __future__ import annotations

from typing import Any

import torch

from kit.engines.base import StateKind
from kit.engines.eight_bit import pieces, require_bitsandbytes
from kit.engines.paged import paged_zeros, part_of, prefetch
from kit.engines.torch.fsdp import local_shard
from kit.specs.job import OptimizerSpec


class PagedAdamW(torch.optim.Optimizer):
    """Steps as ``torch.optim.AdamW``. ``state``: step, exp_avg, exp_avg_sq, of the shape of the rank's slice.

    bitsandbytes' class, PagedAdamW32bit, does not support DTensor, and waits for the device after every parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, learning_rate: float) -> None:
        """Raises EngineError if bitsandbytes is missing, or on a CPU."""
        require_bitsandbytes(f"{spec.name} with layout.paged_optimizer=true")
        super().__init__(groups, {"lr": learning_rate, "betas": (spec.beta1, spec.beta2), "eps": spec.eps})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter] = {"step": torch.zeros(())} | {
                kind.value: paged_zeros(local_shard(parameter.detach()), torch.float32)
                for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Step all parameters that have a gradient; not collective, does not wait for the device."""
        import bitsandbytes.functional as F

        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, weight = self.state[parameter], local_shard(parameter.detach())
                first, second = state[StateKind.EXP_AVG.value], state[StateKind.EXP_AVG_SQ.value]
                gradient = local_shard(parameter.grad).contiguous()
                assert weight.is_contiguous()
                state["step"] += 1
                # Before the update, as torch does; bitsandbytes' kernel decays after it.
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                prefetch(first, second)
                for part, _ in pieces(weight.numel()):
                    F.optimizer_update_32bit(
                        "adam",
                        gradient.view(-1)[part],
                        weight.view(-1)[part],
                        part_of(first, part),
                        group["betas"][0],
                        group["eps"],
                        int(state["step"]),
                        group["lr"],
                        part_of(second, part),
                        group["betas"][1],
                    )

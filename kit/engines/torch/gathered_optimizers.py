"""Muon and Adafactor, whose step of a matrix depends on all of its elements: both gather one parameter at a time.

torch.optim's own classes do not step sharded parameters correctly. On DTensors Adafactor raises for matrices and steps
vectors by other sizes, and Muon's iteration sums in 16 bits over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim._adafactor import adafactor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr

from kit.engines.torch.fsdp import full_tensor, local_shard, own_slice
from kit.specs.job import OptimizerSpec

_MOMENTUM = 0.95
"""torch.optim.Muon's default, as in Keller Jordan's Muon."""


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon (Nesterov momentum, update size of AdamW) for matrices that may be sharded.

    Every rank gathers the update of a matrix and orthogonalises all of it: so all layouts compute the same update.
    ``state``: momentum_buffer, which the caller creates.
    """

    def __init__(
        self, matrices: list[torch.nn.Parameter], spec: OptimizerSpec, learning_rate: float, dtype: torch.dtype
    ) -> None:
        """``dtype``: of the gathered update and the iteration. torch.optim.Muon has bf16; the result then depends on
        the last bits of the gradient (1e-3 of the weights after five steps), so fp32 runs take fp32."""
        assert all(matrix.ndim == 2 for matrix in matrices), "a rule refuses models with experts"
        self._dtype = dtype
        super().__init__(matrices, {"lr": learning_rate, "weight_decay": spec.weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Collective. Step all matrices that have a gradient (torch/optim/_muon.py, _single_tensor_muon)."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix]["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                update = orthogonalised(full_tensor(matrix.grad.lerp(momentum, _MOMENTUM).to(self._dtype)))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                rate = _adjust_lr(group["lr"], "match_rms_adamw", matrix.shape)
                local_shard(matrix).add_(own_slice(matrix, update), alpha=-rate)


def orthogonalised(update: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values near 1, in the dtype of ``update`` (torch/optim/_muon.py,
    _zeropower_via_newtonschulz, which casts to bf16). Changes ``update``."""
    wide = update if update.size(0) <= update.size(1) else update.T
    wide.div_(wide.norm().clamp(min=EPS))
    for _ in range(DEFAULT_NS_STEPS):
        gram = wide @ wide.T
        gram = torch.addmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C)
        wide = torch.addmm(wide, gram, wide, beta=DEFAULT_A)
    return wide if update.size(0) <= update.size(1) else wide.T


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor with its default values, for parameters that may be sharded.

    ``state``: row_var and col_var, the means of rows and columns of the squared gradient; of vectors, variance. Each
    rank has them whole.
    """

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            shape, device = parameter.shape, parameter.device
            state: dict[str, torch.Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
            if parameter.ndim > 1:
                state["row_var"] = torch.zeros(*shape[:-1], 1, device=device)
                state["col_var"] = torch.zeros(*shape[:-2], 1, shape[-1], device=device)
            else:
                state["variance"] = torch.zeros(shape, device=device)
            self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Collective. Step all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, whole = self.state[parameter], full_tensor(parameter.detach())
                adafactor(
                    [whole],
                    [full_tensor(parameter.grad)],
                    [state.get("row_var")],
                    [state.get("col_var")],
                    [state.get("variance")],
                    [state["step"]],
                    foreach=False,
                    d=1.0,
                    lr=group["lr"],
                    beta2_decay=-0.8,
                    weight_decay=group["weight_decay"],
                    eps1=torch.finfo(whole.dtype).eps,
                    eps2=1e-3,
                    maximize=False,
                )
                if isinstance(parameter, DTensor):
                    local_shard(parameter).copy_(own_slice(parameter, whole))

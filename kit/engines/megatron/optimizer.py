"""megatron-core's optimizers with torch's AdamW kernel, on the GPU and on the host, and torch's SGD.

Without Transformer Engine and apex, megatron-core falls back to ``torch.optim.AdamW``. But its distributed optimizer
can save and resume an optimizer only if ``step`` is in the parameter group, as in apex's FusedAdam
(optimizer/distrib_optimizer.py, ``state_dict``). ``Adam`` keeps it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.optim.adam import adam

from kit.engines.megatron.versions import allow_missing_transformer_engine, use_optimizers
from kit.errors import EngineError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Adam(torch.optim.Optimizer):
    """Adam with decoupled (``adam_w_mode``) or L2 weight decay, and apex FusedAdam's arguments and state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        **newer: Any,
    ) -> None:
        # 0.19 passes ``capturable`` to every Adam (optimizer/__init__.py): whether CUDA graphs capture the step.
        assert newer in ({}, {"capturable": False}), newer
        self._decoupled = adam_w_mode
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Take one step. Increments every group's step count, also of groups without parameters on this rank."""
        assert closure is None
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self.initialize(param)
            adam(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                max_exp_avg_sqs=[],
                # One tensor per parameter: the kernel increments each of them.
                state_steps=[torch.full((), float(group["step"]), device=param.device) for param in params],
                fused=True,
                decoupled_weight_decay=self._decoupled,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] += 1

    def initialize(self, param: torch.Tensor) -> None:
        """Create zero moments, of the parameter's shape and dtype, unless they exist."""
        if not self.state[param]:
            self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}


class HostAdam(Adam):
    """``Adam`` of parameters whose state is in host memory. ``HybridDeviceOptimizer`` tells its two by their class."""


class Sgd(torch.optim.SGD):
    """torch's SGD with a step count in its groups and momentum from the start, as ``Adam`` has them."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=momentum)
        for group in self.param_groups:
            group["step"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # a closure would return the loss
        """Take one step, and count it in every group."""
        super().step(closure)
        for group in self.param_groups:
            group["step"] += 1

    def initialize(self, param: torch.Tensor) -> None:
        """Create a zero momentum, of the parameter's shape and dtype, unless it exists."""
        if self.state[param].get("momentum_buffer") is None:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)


def optimizer_config(settings: Mapping[str, Any]) -> OptimizerConfig:
    """Convert ``optimizer`` of megatron.yaml to megatron-core's class. Raises EngineError if the class refuses a
    value."""
    allow_missing_transformer_engine()
    try:
        return OptimizerConfig(**{**settings, "params_dtype": _DTYPES[settings["params_dtype"]]})
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        raise EngineError(f"megatron-core refuses optimizer in megatron.yaml: {error}") from error


def build_optimizer(config: OptimizerConfig, chunks: list[torch.nn.Module]) -> ChainedOptimizer:
    """Build the optimizer of this rank's model chunks. ``chunks``: wrapped for data parallelism."""
    use_optimizers(Adam, HostAdam, Sgd)
    for table in (each for chunk in chunks for each in chunk.modules() if isinstance(each, torch.nn.Embedding)):
        positions: Any = table.weight
        positions.is_embedding_or_output_parameter = True  # otherwise Muon would take them for a matrix
    optimizer = get_megatron_optimizer(config, chunks)
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, HybridDeviceOptimizer):
            _count_steps(each.optimizer)
        elif not isinstance(each.optimizer, Adam | Sgd):
            each.init_state_fn(each.optimizer)  # Muon's momentum from the start, as ``Adam`` and ``Sgd`` have it
    for group in optimizer.param_groups:
        # Norms and biases have wd_mult 0. Only OptimizerParamScheduler applies it, but kit has its own schedule.
        group["weight_decay"] *= group["wd_mult"]
    return optimizer


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that hold the state: of a hybrid one, those on the host and the one on the GPU."""
    return list(optimizer.sub_optimizers) if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def inner_parameter(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that is stepped for an optimizer's parameter: of a hybrid one, its fp32 master weight."""
    return optimizer.param_to_inner_param[parameter] if isinstance(optimizer, HybridDeviceOptimizer) else parameter


def _count_steps(hybrid: HybridDeviceOptimizer) -> None:
    """Count steps in the groups of the hybrid optimizer. Before each step it copies its groups to the Adams inside.
    Its own arguments leave the groups: some are classes, and a checkpoint has the groups."""
    for group in hybrid.param_groups:
        for name in hybrid.defaults.keys() - {"lr", "betas", "eps", "weight_decay"}:
            del group[name]
        group["step"] = 0

    def count(*_: Any) -> None:
        for group in hybrid.param_groups:
            group["step"] += 1

    hybrid.register_step_post_hook(count)

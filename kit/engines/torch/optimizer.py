"""AdamW as every engine means it, with its state allocated from the start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kit.specs.job import OptimizerSpec


def build_adamw(
    parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec, learning_rate: float
) -> torch.optim.AdamW:
    """Decoupled weight decay on matrices, none on one-dimensional parameters (norms, biases).

    The moments exist at once, as zeros: memory does not grow at the first step, and a checkpoint can be imported
    before it. torch's own lazy start (torch/optim/adam.py, Adam._init_group) does the same later.
    """
    parameters = list(parameters)
    # A group's tensors are stepped together, so those of another mesh (tensor parallelism cuts some) have their own.
    by_kind: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.ndim > 1, getattr(parameter, "device_mesh", None)), []).append(parameter)
    groups = [
        {"params": params, "weight_decay": spec.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in by_kind.items()
    ]
    fused = _fuses(parameters)
    optimizer = torch.optim.AdamW(
        groups,
        lr=learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        fused=fused or None,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            # The fused kernel wants the step beside the parameter, the others on the CPU.
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def _fuses(parameters: list[torch.nn.Parameter]) -> bool:
    """One kernel for all parameters: where the host would otherwise launch one after the other."""
    return all(parameter.device.type == "cuda" for parameter in parameters)


def moments_of(optimizer: torch.optim.AdamW, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp_avg, exp_avg_sq) of one parameter, to read or to fill."""
    state = optimizer.state[parameter]
    return state["exp_avg"], state["exp_avg_sq"]


def step_of(optimizer: torch.optim.AdamW, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Adam's step count for one parameter: a scalar tensor, to read or to fill."""
    return optimizer.state[parameter]["step"]

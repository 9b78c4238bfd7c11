"""AdamW as every engine means it, with its state allocated from the start; of matrices in 8 bits on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from kit.engines.base import StateKind
from kit.engines.torch.eight_bit import EightBitAdamW
from kit.engines.torch.fsdp import local_shard
from kit.specs.job import OptimizerSpec


class Optimizer:
    """Decoupled weight decay on matrices, none on one-dimensional parameters (norms, biases)."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec, learning_rate: float) -> None:
        """Raises EngineError where 8 bits are asked for and not to be had."""
        parameters = list(parameters)
        eight_bit = [p for p in parameters if p.ndim > 1] if spec.name == "adamw-8bit" else []
        whole = [p for p in parameters if p.ndim <= 1] if eight_bit else parameters
        self.eight_bit = EightBitAdamW(eight_bit, spec) if eight_bit else None
        self.adamw = build_adamw(whole, spec, learning_rate) if whole else None
        self._parameters = parameters
        self.steps = 0
        """Adam's step count."""

    def step(self, learning_rate: float, of_short: torch.Tensor | None) -> None:
        """Step all parameters that have a gradient; no collective. ``of_short``: factor of 16-bit gradients, applied to
        their fp32 copies."""
        self.steps += 1
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate
            self.adamw.step()
        if self.eight_bit is not None:
            self.eight_bit.step(self.steps, learning_rate, of_short)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def set_steps(self, steps: int) -> None:
        """Set Adam's step count."""
        self.steps = steps
        for state in self.adamw.state.values() if self.adamw is not None else ():
            state["step"].fill_(steps)

    def moment(self, kind: StateKind, parameter: torch.nn.Parameter) -> torch.Tensor:
        """EXP_AVG or EXP_AVG_SQ, fp32, cut as the parameter is: the state itself, or a copy of what is in 8 bits."""
        if self.eight_bit is None or parameter not in self.eight_bit.moments:
            return self._of_adamw(parameter)[kind.value]
        values = self.eight_bit.moments[parameter][kind].read()
        if not isinstance(parameter, DTensor):
            return values
        return DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def store_moment(self, kind: StateKind, parameter: torch.nn.Parameter, moment: torch.Tensor) -> None:
        """Take ``moment`` (fp32, of the parameter's shape) over, after it was filled: into 8 bits, or not at all, where
        it is the state itself."""
        if self.eight_bit is not None and parameter in self.eight_bit.moments:
            self.eight_bit.moments[parameter][kind].write(local_shard(moment))

    def local_state(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
        """What this rank holds of a parameter's moments, nothing else and to the bit: under ``exp_avg`` and
        ``exp_avg_sq`` fp32 values, or codes, whose scales are under ``exp_avg_scales`` and ``exp_avg_sq_scales``."""
        kinds = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
        if self.eight_bit is None or parameter not in self.eight_bit.moments:
            state = self._of_adamw(parameter)
            return {kind.value: local_shard(state[kind.value]) for kind in kinds}
        moments = self.eight_bit.moments[parameter]
        codes = {kind.value: moments[kind].codes for kind in kinds}
        return codes | {f"{kind.value}_scales": moments[kind].scales for kind in kinds}

    def _of_adamw(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        assert self.adamw is not None
        return self.adamw.state[parameter]


def build_adamw(
    parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec, learning_rate: float
) -> torch.optim.AdamW:
    """torch's.

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

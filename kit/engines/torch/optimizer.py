"""AdamW with the weight decay of all engines, and with moments from the start; optionally 8-bit moments of matrices."""

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
    """AdamW with weight decay on matrices and none on one-dimensional parameters (norms, biases)."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec, learning_rate: float) -> None:
        """Raises EngineError if ``spec`` asks for 8 bits and ``EightBitAdamW`` refuses."""
        parameters = list(parameters)
        eight_bit = [p for p in parameters if p.ndim > 1] if spec.name == "adamw-8bit" else []
        whole = [p for p in parameters if p.ndim <= 1] if eight_bit else parameters
        self.eight_bit = EightBitAdamW(eight_bit, spec) if eight_bit else None
        self.adamw = build_adamw(whole, spec, learning_rate) if whole else None
        self._parameters = parameters
        self.steps = 0
        """Adam's step count."""

    def step(self, learning_rate: float, of_short: torch.Tensor | None) -> None:
        """Step all parameters that have a gradient; not collective. ``of_short``: clipping factor of 16-bit gradients,
        applied to their fp32 copies."""
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
        """EXP_AVG or EXP_AVG_SQ, fp32, sharded like the parameter: the live state, or a copy of an 8-bit moment."""
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
        """Store the tensor of ``moment()`` after the caller has changed it: quantise 8-bit moments. No-op for others,
        where ``moment`` is the live state."""
        if self.eight_bit is not None and parameter in self.eight_bit.moments:
            self.eight_bit.moments[parameter][kind].write(local_shard(moment))

    def local_state(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
        """This rank's slices of a parameter's moments, bit for bit: fp32 values as ``exp_avg`` and ``exp_avg_sq``. For
        8-bit moments these are uint8 codes, with fp32 scales as ``exp_avg_scales`` and ``exp_avg_sq_scales``."""
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
    """torch's AdamW, with moments of zero from the start.

    So memory does not grow in the first step, and a checkpoint can be imported before it. torch itself creates the same
    moments in the first step (torch/optim/adam.py, Adam._init_group).
    """
    parameters = list(parameters)
    # torch steps the tensors of a group together, so tensors of different meshes need different groups: with tensor
    # parallelism, only some parameters are on the tensor-parallel mesh.
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
            # The fused kernel needs the step count on the parameter's device, other implementations on the CPU.
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def _fuses(parameters: list[torch.nn.Parameter]) -> bool:
    """Whether to use torch's fused kernel: on CUDA only, where it saves kernel launches."""
    return all(parameter.device.type == "cuda" for parameter in parameters)

"""The optimizers of the torch engine, with moments from the start; the weight decay of all engines.

``kit.specs.optimizers`` says which implementation steps what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from kit.engines.moments import is_factored, live_moment, second_moment, set_second_moment
from kit.engines.protocol import StateKind
from kit.engines.torch.eight_bit import CODES, SCALES, EightBit, moments_of
from kit.engines.torch.fsdp import local_shard
from kit.engines.torch.gathered_optimizers import Adafactor, Muon
from kit.engines.torch.lion import Lion
from kit.engines.torch.paged import Paged
from kit.engines.torch.stochastic_rounding import Rounding, build_stochastic
from kit.specs.job import OptimizerSpec

_MOMENTS = (StateKind.EXP_AVG.value, StateKind.EXP_AVG_SQ.value)


class Optimizer:
    """Steps all parameters, with weight decay on matrices and none on one-dimensional parameters (norms, biases)."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        spec: OptimizerSpec,
        learning_rate: float,
        vocabulary: Collection[torch.nn.Parameter] = (),
        muon_dtype: torch.dtype = torch.bfloat16,
        rounding: Rounding | None = None,
    ) -> None:
        """``vocabulary``: parameters of embeddings and head, which Muon leaves to AdamW. ``muon_dtype``: of Muon's
        iteration. ``rounding``: of AdamW's new weights in bf16; None: to the nearest. Raises EngineError if
        bitsandbytes or torchao is needed and missing."""
        parameters = list(parameters)
        eight_bit = [p for p in parameters if p.ndim > 1] if spec.name.endswith("-8bit") else []
        whole = [p for p in parameters if p.ndim <= 1] if eight_bit else parameters
        self._rounding = rounding
        of_vocabulary = {id(parameter) for parameter in vocabulary}
        self._optimizers = _build(whole, spec, learning_rate, of_vocabulary, muon_dtype, rounding is not None)
        if eight_bit:
            kind = Paged if spec.name.startswith("paged") else EightBit
            own = kind([{"params": eight_bit}], spec, learning_rate, rounding is not None)
            for matrix in eight_bit:
                own.moments(matrix)  # zeros, from the start
            self._optimizers.append(own)
        self._parameters = parameters
        self._state = {parameter: state for each in self._optimizers for parameter, state in each.state.items()}
        self.steps = 0
        """Number of steps, for bias correction."""

    def step(self, learning_rate: float, of_short: torch.Tensor | None) -> None:
        """Step all parameters that have a gradient. Collective for Muon and Adafactor. ``of_short``: clipping factor of
        16-bit gradients, applied to their fp32 copies."""
        self.steps += 1
        with nullcontext() if self._rounding is None else self._rounding.of_step(self.steps):
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    is_tensor = isinstance(group["lr"], torch.Tensor)  # of torchao's optimizers
                    group["lr"] = group["lr"].fill_(learning_rate) if is_tensor else learning_rate
                if isinstance(optimizer, EightBit):
                    optimizer.of_short = of_short
                optimizer.step()

    def casts(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the step clips an fp32 copy of the gradient (``of_short``), not the gradient itself."""
        short = parameter.grad is not None and parameter.grad.dtype is not torch.float32
        return short and bool(moments_of(self._state[parameter]))

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def set_steps(self, steps: int) -> None:
        """Set the number of steps."""
        self.steps = steps
        for state in self._state.values():
            if "step" in state:
                state["step"].fill_(steps)

    def moment(self, kind: StateKind, parameter: torch.nn.Parameter) -> torch.Tensor:
        """EXP_AVG or EXP_AVG_SQ, fp32: the live state, sharded like the parameter; a copy of an 8-bit moment; zeros of
        a moment that the optimizer does not have. Of Adafactor the whole matrix, the product of its two factors."""
        state = self._state[parameter]
        moments = moments_of(state)
        if kind not in moments:
            return second_moment(state) if is_factored(state, kind) else live_moment(state, kind, parameter)
        values = moments[kind].read()
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
        """Store the tensor of ``moment()`` after the caller has changed it: quantise 8-bit moments, and take the means
        of rows and columns for Adafactor. No-op for others, where ``moment`` is the live state."""
        if own := moments_of(self._state[parameter]).get(kind):
            own.write(local_shard(moment))
        elif is_factored(self._state[parameter], kind):
            set_second_moment(self._state[parameter], moment)

    def private_state(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
        """The state of which ``moment`` returns a rounded copy: this rank's 8-bit codes and their scales, and
        Adafactor's means of rows and columns, which every rank has."""
        state = self._state[parameter]
        return {key: state[key] for key in state if key.endswith((CODES, SCALES, "row_var", "col_var"))}

    def moments(self) -> list[torch.Tensor]:
        """This rank's slices of all moments, as they are held: 8-bit moments as codes and scales."""
        return [local_shard(value) for each in self._state.values() for key, value in each.items() if key != "step"]


def vocabulary(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters of a Hugging Face model's embeddings and output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return {parameter for module in (*modules, head) if module is not None for parameter in module.parameters()}


def _build(
    parameters: list[torch.nn.Parameter],
    spec: OptimizerSpec,
    learning_rate: float,
    vocabulary: set[int],
    muon_dtype: torch.dtype,
    stochastic: bool,
) -> list[torch.optim.Optimizer]:
    """The optimizers that step ``parameters``, each with its state. ``vocabulary``: ids of embeddings and head."""
    if not parameters:
        return []
    if stochastic:
        return [_with_state(build_stochastic(_groups(parameters, spec), spec, learning_rate), _MOMENTS)]
    if spec.name == "muon":
        matrices = [p for p in parameters if p.ndim > 1 and id(p) not in vocabulary]
        chosen = {id(p) for p in matrices}
        rest = [p for p in parameters if id(p) not in chosen]
        muon = [_with_state(Muon(matrices, spec, learning_rate, muon_dtype), ("momentum_buffer",))] if matrices else []
        return [*muon, *([build_adamw(rest, spec, learning_rate)] if rest else [])]
    if spec.name == "adafactor":
        return [Adafactor(_groups(parameters, spec), learning_rate)]
    if spec.name == "sgd":
        sgd = torch.optim.SGD(_groups(parameters, spec), lr=learning_rate, momentum=spec.beta1)
        return [_with_state(sgd, ("momentum_buffer",))]
    if spec.name.startswith("lion"):
        return [_with_state(Lion(_groups(parameters, spec), spec, learning_rate), (StateKind.EXP_AVG.value,))]
    return [build_adamw(parameters, spec, learning_rate)]


def _with_state(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> torch.optim.Optimizer:
    """``optimizer`` with moments of zero, as it would create them in its first step."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] |= {
            name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names
        }
    return optimizer


def _groups(parameters: list[torch.nn.Parameter], spec: OptimizerSpec) -> list[dict[str, Any]]:
    """Groups of parameters: matrices with weight decay, vectors without.

    torch steps the tensors of a group together, so tensors of different meshes need different groups: with tensor
    parallelism, only some parameters are on the tensor-parallel mesh.
    """
    by_kind: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.ndim > 1, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [
        {"params": params, "weight_decay": spec.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in by_kind.items()
    ]


def build_adamw(
    parameters: Iterable[torch.nn.Parameter], spec: OptimizerSpec, learning_rate: float
) -> torch.optim.Optimizer:
    """torch's AdamW, with moments of zero from the start.

    So memory does not grow in the first step, and a checkpoint can be imported before it. torch itself creates the same
    moments in the first step (torch/optim/adam.py, Adam._init_group).
    """
    parameters = list(parameters)
    fused = _fuses(parameters)
    optimizer = torch.optim.AdamW(
        _groups(parameters, spec),
        lr=learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        fused=fused or None,
    )
    for parameter in parameters:
        # The fused kernel needs the step count on the parameter's device, other implementations on the CPU.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": step}
    return _with_state(optimizer, _MOMENTS)


def _fuses(parameters: list[torch.nn.Parameter]) -> bool:
    """Whether to use torch's fused kernel: on GPUs, where it saves launches, and for what FSDP2 keeps in a GPU's host,
    where it passes once over memory that is passed over eleven times without it."""
    return torch.cuda.is_available() and len({parameter.device.type for parameter in parameters}) == 1

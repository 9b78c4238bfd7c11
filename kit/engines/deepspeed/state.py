"""Reads and sets the state of DeepSpeed's optimizers: master weights, moments and gradients of one parameter at a time.

    ParameterState
    ├── UnshardedState           stage 0: every rank has the whole state
    ├── PartitionedState         stages 1 and 2: every rank has a slice of each flat parameter group
    └── FullyPartitionedState    stage 3: every rank has a slice of each parameter and of its state
        └── NvmeState            stage 3 with state on NVMe (nvme_state.py)

``gradient`` is collective and returns the whole fp32 tensor on every rank, on the engine's device; ``own_part`` returns
what a rank has, and ``set_part`` sets it; ``set`` takes the whole tensor on every rank and keeps this rank's part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_grad

from kit.engines.deepspeed.eight_bit import EightBitAndVectors
from kit.engines.huggingface.adapters import scale_bytes
from kit.engines.moments import is_factored, live_moment, second_moment, set_second_moment
from kit.engines.protocol import StateKind
from kit.engines.torch.eight_bit import moments_of

Parameter = Any
"""A ``torch.nn.Parameter`` with the attributes and methods that DeepSpeed adds."""


class ParameterState(ABC):
    """Reads and sets the state of single parameters (this module's docstring)."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._optimizer: Any = engine.optimizer
        self._adam: torch.optim.Optimizer = engine.basic_optimizer
        """The optimizer inside DeepSpeed's: Adam, or another one of kit.specs.optimizers."""
        self._copy: _Copy | None = None
        self._changed = False

    def gradient(self, parameter: Parameter) -> torch.Tensor:
        """The parameter's gradient, between backward and step: fp32, of the whole parameter's shape."""
        return safe_get_full_grad(parameter).float()

    @abstractmethod
    def own_part(self, parameter: Parameter, kind: StateKind) -> tuple[int, torch.Tensor]:
        """(start in the flattened parameter, values) of what this rank has of MASTER or a moment: fp32, of any shape,
        perhaps empty; live, or a copy until ``release_buffers``. Not collective. Moments must be there
        (``create_moments``); what the optimizer does not have is zero."""

    def set_part(self, parameter: Parameter, kind: StateKind, values: torch.Tensor) -> None:
        """Set what ``own_part`` returns; ``values``: as many, of any dtype. Master weights show in the model after
        ``update_model``, moments in the optimizer after ``release_buffers``."""
        own = self.own_part(parameter, kind)[1]
        own.copy_(values.view_as(own))
        self._changed = True

    def set(self, parameter: Parameter, kind: StateKind, whole: torch.Tensor) -> None:
        """``set_part`` from the whole parameter's state."""
        start, own = self.own_part(parameter, kind)
        self.set_part(parameter, kind, whole.flatten()[start : start + own.numel()])

    @abstractmethod
    def update_model(self) -> None:
        """Copy the master weights into the model's weights."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Discard the gradients that backward accumulated."""

    @abstractmethod
    def master_weights(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """(parameter group, master weight) of all tensors that Adam updates on this rank: fp32, flat if ZeRO partitions
        them."""

    def _optimizer_gradients(self) -> Iterable[torch.Tensor | None]:
        """Gradients that the optimizer stores now, apart from ``parameter.grad``."""
        return ()

    def release_buffers(self) -> None:
        """Release the buffers that reading and setting state needs, and store what was set in them. Call this before
        the next forward pass."""
        if self._copy is not None and self._changed:
            self._copy.store(self._copy.values)
        self._copy, self._changed = None, False

    def _live(self, master: torch.Tensor, kind: StateKind) -> torch.Tensor:
        """One kind of state of one of ``master_weights``, in its shape. Of a moment in 8 bits or in Adafactor's factors
        a copy in fp32; one copy is there at a time."""
        if kind is StateKind.MASTER:
            return master.data
        state = self._adam.state[master]
        if (moment := moments_of(state).get(kind)) is not None:
            return self._copied(master, kind, moment.read, moment.write)
        if is_factored(state, kind):
            return self._copied(master, kind, partial(second_moment, state), partial(set_second_moment, state))
        return live_moment(state, kind, master)

    def _copied(
        self, master: torch.Tensor, kind: StateKind, read: Callable[[], torch.Tensor], store: _Store
    ) -> torch.Tensor:
        if self._copy is None or self._copy.master is not master or self._copy.kind is not kind:
            self.release_buffers()
            self._copy = _Copy(master, kind, read(), store)
        return self._copy.values

    def create_moments(self) -> None:
        """Create zero moments by a step of Adam with learning rate 0 and gradient 0: every implementation of Adam
        creates its state in its first step.

        Weights stay equal, bit for bit. No-op if the moments exist.
        """
        for group, master in self.master_weights():
            self._create_moments_of(master, group)

    def _create_moments_of(self, master: torch.Tensor, group: dict[str, Any]) -> bool:
        """Create the moments of one master weight. Returns False if they exist already."""
        if self._adam.state.get(master):
            return False
        groups, gradient = self._adam.param_groups, master.grad
        master.grad = torch.zeros_like(master)
        self._adam.param_groups = [{**group, "params": [master], "lr": 0.0, "weight_decay": 0.0}]
        self._adam.step()
        self._adam.param_groups, master.grad = groups, gradient
        self._set_step(self._adam.state[master], 0)
        return True

    def set_optimizer_steps(self, steps: int) -> None:
        """Set the optimizer's step count, if it has one. Creates zero moments if there are none yet."""
        self.create_moments()
        for state in self._adam.state.values():
            self._set_step(state, steps)

    @staticmethod
    def _set_step(state: dict[str, Any], steps: int) -> None:
        """torch's Adam counts steps in a tensor, DeepSpeed's Adams in an int."""
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(steps)
        elif "step" in state:
            state["step"] = steps

    def private_tensors(self) -> dict[str, torch.Tensor]:
        """``Engine.private_tensors``: 8-bit codes and scales of partitions, and Adafactor's means of rows and
        columns."""
        if not isinstance(self._adam, (EightBitAndVectors, torch.optim.Adafactor)):
            return {}
        self.create_moments()
        return {
            f"{key}.{index}": tensor
            for index, (_, master) in enumerate(self.master_weights())
            for key, tensor in self._adam.state[master].items()
            if key.endswith(("_codes", "_scales", "_var"))
        }

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients and optimizer (master weights and moments). Shared storage counts
        once."""
        parameters = list(self._engine.module.parameters())
        weights = [tensor for p in parameters for tensor in (p.data, getattr(p, "ds_tensor", None))]
        optimizer = [master for _, master in self.master_weights()]
        optimizer += [t for state in self._adam.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        seen: set[int] = set()
        return {
            "weights": new_bytes(weights, seen) + scale_bytes(self._engine.module),
            "gradients": new_bytes([*(p.grad for p in parameters), *self._optimizer_gradients()], seen),
            "optimizer": new_bytes(optimizer, seen),
        }


_Store = Callable[[torch.Tensor], None]


class _Copy(NamedTuple):
    """A moment in fp32, and how to store it."""

    master: torch.Tensor
    kind: StateKind
    values: torch.Tensor
    store: _Store


class UnshardedState(ParameterState):
    """Stage 0. fp32: Adam updates the parameters. bf16: Adam updates an fp32 copy of each parameter."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self._master: dict[Parameter, torch.Tensor] = {p: p for p in engine.module.parameters() if p.requires_grad}
        """Model weight → the tensor that Adam updates."""
        if isinstance(self._optimizer, FP16_UnfusedOptimizer):
            groups = zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
            self._master = {key: value for pair in groups for key, value in zip(*pair, strict=True)}
            # DeepSpeed creates Adam's state by a real step (unfused_optimizer.py, initialize_optimizer_states): weight
            # decay changes the master weights, and bias correction stays one step ahead. By step 10 this changes the
            # gradient norm by 3 %.
            self._optimizer.refresh_fp32_params()
            for tensor in (each for state in self._adam.state.values() for each in state.values()):
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()  # SGD adds weight decay to its momentum
            self.set_optimizer_steps(0)

    def gradient(self, parameter: Parameter) -> torch.Tensor:
        return parameter.grad.float()

    def own_part(self, parameter: Parameter, kind: StateKind) -> tuple[int, torch.Tensor]:
        return 0, self._live(self._master[parameter], kind)

    def update_model(self) -> None:
        for parameter, master in self._master.items():
            parameter.data.copy_(master.data)

    def clear_gradients(self) -> None:
        self._engine.zero_grad()

    def master_weights(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        return [(group, master) for group in self._adam.param_groups for master in group["params"]]


class PartitionedState(ParameterState):
    """Stages 1 and 2: DeepSpeedZeroOptimizer, or BF16_Optimizer (stage 1 with fp32 accumulation)."""

    def own_part(self, parameter: Parameter, kind: StateKind) -> tuple[int, torch.Tensor]:
        if (mapping := parameter._hp_mapping) is None:
            return 0, torch.empty(0)
        flat = self._live(self.master_weights()[mapping.param_group_index][1], kind)
        own = mapping.hp_fragment_address
        return mapping.lp_fragment_address.start, flat.narrow(0, own.start, own.numel)

    def update_model(self) -> None:
        self._optimizer.update_lp_params()

    def clear_gradients(self) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, BF16_Optimizer):
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
            return
        # Repeats the first lines of step(), and what it does on an overflow (stage_1_and_2.py, step).
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()
        optimizer._release_preflattened_grad_buffers()
        for index in optimizer.averaged_gradients:
            optimizer.averaged_gradients[index] = None
            optimizer.all_grad_tensors[index] = None

    def master_weights(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        return [(group, group["params"][0]) for group in self._adam.param_groups]

    def _optimizer_gradients(self) -> Iterable[torch.Tensor | None]:
        yield from (master.grad for _, master in self.master_weights())
        if isinstance(self._optimizer, BF16_Optimizer):
            yield from self._optimizer.fp32_groups_gradients_flat
        else:
            yield from (gradient for group in self._optimizer.averaged_gradients.values() for gradient in group or ())


class FullyPartitionedState(ParameterState):
    """Stage 3, DeepSpeedZeroOptimizer_Stage3: every rank of the group has a padded slice of each parameter."""

    def own_part(self, parameter: Parameter, kind: StateKind) -> tuple[int, torch.Tensor]:
        group, at, length = self._position(parameter)
        flat = self._live(self._swap_in(group), kind)
        start = length * dist.get_rank(parameter.ds_process_group)
        return start, flat.narrow(0, at, max(0, min(length, parameter.ds_numel - start)))

    def _position(self, parameter: Parameter) -> tuple[int, int, int]:
        """(sub group, start, length) of this rank's padded part of the parameter in the flat sub group."""
        return self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]

    def update_model(self) -> None:
        # Repeats the end of step(), after Adam (stage3.py, step and _post_step).
        optimizer = self._optimizer
        optimizer._partition_all_parameters()
        optimizer.invalidate_secondary_tensor()  # hpZ: the next forward builds it from the new weights
        for index in range(len(optimizer.fp16_groups)):
            self._swap_in(index)
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        self.release_buffers()
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _swap_in(self, group: int) -> torch.Tensor:
        """The flat fp32 master weight of a sub group."""
        return self._optimizer.fp32_partitioned_groups_flat[group]

    def clear_gradients(self) -> None:
        self._optimizer._offload_boundary_param_ids = set()
        self._optimizer._overflow_clean_up(self._optimizer.loss_scale)

    def master_weights(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        return list(zip(self._groups(), self._optimizer.fp32_partitioned_groups_flat, strict=True))

    def _optimizer_gradients(self) -> Iterable[torch.Tensor | None]:
        return (*(master.grad for _, master in self.master_weights()), self._optimizer.grad_partitions_flat_buffer)

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter group of each sub group."""
        of_sub_group = self._optimizer.sub_group_to_group_id
        return [self._adam.param_groups[of_sub_group[i]] for i in range(len(self._optimizer.fp16_groups))]


def new_bytes(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> int:
    """Bytes of the tensors' storages whose addresses are not in ``seen``; adds these addresses to ``seen``."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None and tensor.numel()]
    fresh = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in seen}
    seen.update(fresh)
    return sum(fresh.values())

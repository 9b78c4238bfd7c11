"""Where megatron-core keeps each kind of state of one parameter, and how to get and set this rank's shard of it.

Three places, by optimizer: with fp32 parameters the parameter is its own master; in bf16 a fp32 ``main_param`` is
beside it; the distributed optimizer cuts the flat parameter (master, moments and reduced gradient) over the
data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from kit.engines.base import StateKind
from kit.engines.megatron.optimizer import Adam

_MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


class LocalState:
    """The state of some of this rank's parameters; collective over the ranks that hold the same ones.

    megatron-core has one optimizer for all parameters, or with expert parallelism two: experts have data-parallel
    ranks of their own.
    """

    def __init__(self, optimizer: MegatronOptimizer, data_parallel_group: dist.ProcessGroup) -> None:
        self._optimizer = optimizer
        self._group = data_parallel_group

    @property
    def adam(self) -> Adam:
        """The inner optimizer."""
        return self._optimizer.optimizer

    @property
    def distributed(self) -> bool:
        """Whether the data-parallel ranks share one copy of the state."""
        return isinstance(self._optimizer, DistributedOptimizer)

    @torch.no_grad()
    def get(self, kind: StateKind, param: torch.nn.Parameter) -> torch.Tensor:
        """fp32, shape of ``param`` (this rank's tensor-parallel shard), the same on all data-parallel ranks."""
        if kind is StateKind.GRADIENT:
            held = None if self.distributed else param.main_grad
        else:
            main = self._main(param)
            held = main if kind is StateKind.MASTER or main is None else self._moments(main)[kind.value]
        if not self.distributed:
            return held.detach().float()
        start, end = self._range(param)
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if start < end:
            part = param.main_grad.flatten()[start:end] if kind is StateKind.GRADIENT else held
            whole[start:end] = part
        dist.all_reduce(whole, group=self._group)  # exact: each element is zero on all ranks but one
        return whole.view_as(param)

    @torch.no_grad()
    def set(self, kind: StateKind, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set a kind of state (not GRADIENT) from a tensor of the shape of ``param``, any dtype and device."""
        assert kind is not StateKind.GRADIENT
        if kind is StateKind.MASTER:
            param.copy_(value)
        main = self._main(param)
        if main is None:
            return
        if self.distributed:
            start, end = self._range(param)
            value = value.flatten()[start:end]
        (main if kind is StateKind.MASTER else self._moments(main)[kind.value]).copy_(value)

    def _main(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """What Adam steps for ``param``: all of it, a flat part, or None where other ranks hold every part."""
        if not self.distributed:
            return getattr(param, "main_param", param)
        if param not in self._optimizer.model_param_group_index_map:
            return None
        group, index = self._optimizer.model_param_group_index_map[param]
        return self.adam.param_groups[group]["params"][index]

    def _range(self, param: torch.nn.Parameter) -> tuple[int, int]:
        if param not in self._optimizer.model_param_group_index_map:
            return 0, 0
        found = self._optimizer._get_model_param_range_map(param)["param"]
        return found.start, found.end

    def _moments(self, main: torch.Tensor) -> dict[str, Any]:
        self.adam.initialize(main)
        return self.adam.state[main]

    def held_bytes(self) -> int:
        """Bytes of masters that are not the parameters themselves, and of moments."""
        held = {tensor for state in self.adam.state.values() for tensor in state.values()}
        if self._optimizer.config.bf16:
            held |= {param for group in self.adam.param_groups for param in group["params"]}
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

"""ZeRO over Megatron's tensor parallelism: megatron-core's GPTModel under DeepSpeed, as Megatron-DeepSpeed did it.

Neighbouring ranks form a tensor-parallel group: they split every matrix and compute one sample together. DeepSpeed
shards each tensor-parallel slice over the data-parallel ranks that have an equal slice. Some parameters are equal on
all ranks of a tensor-parallel group, but each rank computes their gradient from its part of the sequence or of the
heads. A hook all-reduces these gradients in backward, before DeepSpeed reads them; the Megatron engine does it after
backward (distributed/finalize_model_grads.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from kit.emit.run_directory import RunDirectory
from kit.engines.deepspeed.state import ParameterState, UnshardedState
from kit.engines.deepspeed.strategy import ModelParallelStrategy
from kit.engines.deepspeed.whole_model import share_memory
from kit.engines.megatron.microbatches import forward
from kit.engines.megatron.model.build import build_chunks, transformer_config
from kit.engines.megatron.resharding.export import export_blocks
from kit.engines.megatron.resharding.groups import ShardGroups
from kit.engines.megatron.resharding.huggingface import HfResharder
from kit.engines.megatron.resharding.optimizer_state import ShardState
from kit.engines.megatron.weights.random import RandomSource
from kit.engines.protocol import MicroBatch, StateKind, TensorShard, TensorSource

_GROUP_FUNCTIONS = (
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_group",
)
"""Functions of megatron-core by which DeepSpeed looks up process groups (utils/groups.py, engine.py). DeepSpeed also
calls the first three by an older name, model parallelism."""


def _tensor_parallel_unit() -> SimpleNamespace:
    """The ``mpu`` argument of ``deepspeed.initialize``."""
    answers = {name: getattr(parallel_state, name) for name in _GROUP_FUNCTIONS}
    return SimpleNamespace(**answers, **{name.replace("tensor_", ""): answers[name] for name in _GROUP_FUNCTIONS[:3]})


class MegatronTensorParallel(ModelParallelStrategy):
    """Tensor and sequence parallelism by Megatron-core, ZeRO by DeepSpeed."""

    tensor_group: dist.ProcessGroup

    def __init__(self, rundir: RunDirectory) -> None:
        self._rundir, self._settings = rundir, rundir.megatron
        parallel_state.initialize_model_parallel(**self._settings["parallel_state"])
        model_parallel_cuda_manual_seed(rundir.run.seed)
        self.mpu = _tensor_parallel_unit()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.tokens_group = parallel_state.get_data_parallel_group()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._config = transformer_config(self._settings["transformer_config"])

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """Build this rank's slice of the model. Stage 3 partitions each matrix as soon as it exists."""
        plan = self._rundir.plan
        with self._partitioned_at_birth(settings):
            (model,) = build_chunks(plan.model, self._config, self._settings["model"])
        for name, parameter in model.named_parameters():
            if self._is_partial(name, parameter):
                parameter.register_hook(partial(_sum_over, self.tensor_group))
        if plan.layout.zero_stage in (1, 2):
            share_memory(model.parameters())  # ``attach``, or ``run.model_path``, sets every weight
        return model

    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        """Attach the engine. Without ``run.model_path``, set random weights, which equal the Megatron engine's on every
        layout."""
        plan = self._rundir.plan
        self._engine = engine
        data = parallel_state.get_data_parallel_group()
        groups = ShardGroups(self.tensor_group, data, _Shards(state, data))
        self._resharder = HfResharder(plan.model, self._config, [engine.module], groups, groups)
        if self._rundir.run.model_path is None:
            self.load(StateKind.MASTER, RandomSource(plan.model, self._rundir.run.seed))
            state.release_buffers()
            state.update_model()

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Summed loss of a micro batch: a scalar, equal on all ranks of a tensor-parallel group."""
        losses, counted = forward(self._engine, micro_batch)
        return (losses * counted).sum()

    def export_blocks(self, kind: StateKind) -> Iterator[TensorShard]:
        return export_blocks(self._resharder, [kind], in_order=kind is StateKind.GRADIENT)

    def load(self, kind: StateKind, source: TensorSource) -> None:
        self._resharder.load(kind, source)

    def close(self) -> None:
        """Destroy megatron-core's process groups."""
        parallel_state.destroy_model_parallel()

    def _partitioned_at_birth(self, settings: dict[str, Any]) -> AbstractContextManager[Any]:
        if self._rundir.plan.layout.zero_stage < 3:
            return nullcontext()
        # megatron-core gives each tensor its dtype. By default zero.Init overrides all dtypes, also of RoPE's fp32
        # frequencies, which changes gradients by 1 %. It turns any dtype passed here into bf16 where fp16 is not
        # supported (partition_parameters.py, _set_dtype: ``dtype or fp16 if … else bf16``).
        return deepspeed.zero.Init(
            data_parallel_group=parallel_state.get_data_parallel_group(),
            config_dict_or_path=settings,
            mpu=self.mpu,
            tensor_overrides=[DeepSpeedTensorOverride.device],
        )

    def _is_partial(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """Whether each tensor-parallel rank computes only a part of the gradient of a parameter that all ranks have:
        norms and biases of row-parallel layers under sequence parallelism, and always norms of single heads."""
        if self._config.tensor_model_parallel_size == 1:
            return False
        is_head_norm = self._config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        return is_head_norm or getattr(parameter, "sequence_parallel", False)


class _Shards(ShardState):
    """``ShardState`` over DeepSpeed's optimizer, which gathers gradients and sets only whole shards of a parameter."""

    def __init__(self, state: ParameterState, data: dist.ProcessGroup) -> None:
        self._state, self._data = state, data

    def shape(self, param: torch.Tensor) -> tuple[int, ...]:
        return tuple(getattr(param, "ds_shape", param.shape))

    def own(self, kind: StateKind, param: torch.nn.Parameter) -> tuple[int, torch.Tensor]:
        gathered = kind is StateKind.GRADIENT
        start, values = (0, self._state.gradient(param)) if gathered else self._state.own_part(param, kind)
        values = values.detach().flatten()
        if gathered or isinstance(self._state, UnshardedState):  # equal on all ranks: each has some of the rows
            rows, rank, size = self.shape(param)[0], self._data.rank(), self._data.size()
            start, end = (rows * each // size * (values.numel() // rows) for each in (rank, rank + 1))
            values = values[start:end]
        return start, values

    def targets(self, kind: StateKind, param: torch.nn.Parameter) -> Iterable[tuple[int, torch.Tensor]]:
        return [(0, torch.empty(math.prod(self.shape(param))))]

    def put(self, kind: StateKind, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        self._state.set(param, kind, values)


def _sum_over(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.contiguous()
    dist.all_reduce(gradient, group=group)
    return gradient

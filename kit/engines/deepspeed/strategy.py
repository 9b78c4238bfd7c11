"""How ranks split the work on one sample, ZeRO apart.

    ModelParallelStrategy
    ├── DataParallel                    no split: every rank computes its own samples (data_parallel.py)
    │   ├── UlyssesSequenceParallel     by sequence; attention exchanges sequences for heads (ulysses.py)
    │   └── AutoTensorParallel          by tensor: DeepSpeed splits the linear layers (autotp.py)
    └── MegatronTensorParallel          by tensor: Megatron-core's model (over_megatron.py)

A strategy builds the model, computes its loss, and knows its parameters under Hugging Face names; DeepSpeed partitions,
reduces and steps whatever model it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from kit.engines.base import MicroBatch, StateBlock, StateKind, TensorSource
from kit.engines.deepspeed.state import ParameterState


class ModelParallelStrategy(ABC):
    """How DeepSpeed splits a model (this module's docstring). Methods are collective."""

    mpu: Any = None
    """What ``deepspeed.initialize`` asks for process groups; None where all ranks are data-parallel."""
    dp_rank: int
    dp_size: int
    tokens_group: dist.ProcessGroup | None = None
    """Ranks whose micro batches make up the step, each token once; None: all ranks."""

    tensor_group: dist.ProcessGroup | None = None
    """Ranks over which parameters are cut, ZeRO apart; None: none is."""

    sequence_group: dist.ProcessGroup | None = None
    """Ranks that split the sequences of one micro batch; None: none do."""

    @property
    def averaged_over(self) -> int:
        """Number by which DeepSpeed divides the sum of gradients; the loss is multiplied by it first."""
        return self.dp_size

    @abstractmethod
    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """The model, with random weights or none; ``settings`` are those of ds_config.json, and may be completed."""

    @abstractmethod
    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        """Called once, when DeepSpeed has taken the model."""

    def shard_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's part of its data-parallel rank's micro batch."""
        return micro_batch

    @abstractmethod
    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Cross entropy in fp32, summed over the tokens that count of what ``shard_batch`` returned."""

    def gradient_norm(self, engine: deepspeed.DeepSpeedEngine) -> float:
        """L2 norm of gradients that are whole on every rank (stage 0), each parameter counted once."""
        trained = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        cut = [parameter.grad for parameter in trained if is_model_parallel_parameter(parameter)]
        whole = [parameter.grad for parameter in trained if not is_model_parallel_parameter(parameter)]
        squares = torch.nn.utils.get_total_norm(cut).square()
        if self.tensor_group is not None:
            dist.all_reduce(squares, group=self.tensor_group)
        return float((squares + torch.nn.utils.get_total_norm(whole).square()).sqrt())

    @property
    def owners(self) -> Mapping[str, int]:
        return {}

    @abstractmethod
    def export_blocks(self, kind: StateKind) -> Iterator[StateBlock]:
        """``Engine.export_blocks`` by this strategy."""

    @abstractmethod
    def load(self, kind: StateKind, source: TensorSource) -> None:
        """``Engine.import_state`` by this strategy."""

    def close(self) -> None:  # noqa: B027 (most have nothing of their own)
        """Give back process groups and hooks of its own, after DeepSpeed's."""

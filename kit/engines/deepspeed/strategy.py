"""How ranks split the work on one sample, independent of ZeRO.

    ModelParallelStrategy
    ├── DataParallel                    no split: every rank computes its own samples (data_parallel.py)
    │   ├── UlyssesSequenceParallel     by sequence, and by heads in attention (ulysses.py)
    │   └── AutoTensorParallel          by tensor: DeepSpeed splits the linear layers (autotp.py)
    └── MegatronTensorParallel          by tensor: Megatron-core's model (over_megatron.py)

A strategy builds the model, computes its loss, and maps its parameters to Hugging Face names. DeepSpeed partitions the
model, reduces gradients and steps the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from kit.engines.deepspeed.state import ParameterState
from kit.engines.protocol import MicroBatch, StateKind, TensorShard, TensorSource


class ModelParallelStrategy(ABC):
    """How DeepSpeed splits a model (this module's docstring). Methods are collective."""

    mpu: Any = None
    """The ``mpu`` argument of ``deepspeed.initialize``, which has the process groups; None if all ranks are
    data-parallel."""
    dp_rank: int
    dp_size: int
    tokens_group: dist.ProcessGroup | None = None
    """Ranks that together have every token of the step once; None: all ranks."""

    sequence_group: dist.ProcessGroup | None = None
    """Ranks that split the sequences of one micro batch; None: each rank has whole sequences."""

    @property
    def averaged_over(self) -> int:
        """Number by which DeepSpeed divides the sum of gradients. The engine multiplies the loss by the same number."""
        return self.dp_size

    @abstractmethod
    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """Build the model, with random weights or with weights that ``attach`` sets. ``settings``: the content of
        ds_config.json; may add keys to it."""

    @abstractmethod
    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        """Keep DeepSpeed's engine and the state of its optimizer. Called once, after ``deepspeed.initialize``."""

    def random_weights(self) -> TensorSource | None:
        """Weights of a run without ``run.model_path``, after ``attach``; None: the model has them."""
        return None

    def shard_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's part of the micro batch of its data-parallel group."""
        return micro_batch

    @abstractmethod
    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Cross entropy of the micro batch of ``shard_batch``, summed over labels that are not ``IGNORE_INDEX``: an
        fp32 scalar."""

    @abstractmethod
    def export_blocks(self, kind: StateKind) -> Iterator[TensorShard]:
        """Blocks of one kind of state (``Engine.export_blocks``). Collective for gradients only."""

    @abstractmethod
    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Set one kind of state from ``source`` (``Engine.import_state``)."""

    def close(self) -> None:  # noqa: B027 (most strategies have no groups of their own)
        """Release the strategy's own process groups and hooks. Called after DeepSpeed has released its own."""

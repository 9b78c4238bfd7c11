"""How ranks share the work on one sample, ZeRO apart.

    Split
    ├── Whole          not at all: every rank computes its own samples with a Hugging Face model (whole.py)
    ├── Ulysses        by sequence, heads exchanged inside attention (ulysses.py)
    ├── AutoTp         by tensor: a Hugging Face model whose linear layers DeepSpeed cuts (autotp.py)
    └── OverMegatron   by tensor: Megatron-core's model (over_megatron.py)

A split builds the model, computes its loss, and knows its parameters under Hugging Face names; DeepSpeed partitions,
reduces and steps whatever it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from kit.engines.base import MicroBatch, StateBlock, StateKind, TensorSource
from kit.engines.deepspeed.state import ParameterState

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


class Split(ABC):
    """See the module's docstring. Methods are collective."""

    mpu: Any = None
    """What ``deepspeed.initialize`` asks for process groups; None where all ranks are data-parallel."""
    dp_rank: int
    dp_size: int
    tokens_group: dist.ProcessGroup | None = None
    """Ranks whose micro batches make up the step, each token once; None: all ranks."""

    tensor_group: dist.ProcessGroup | None = None
    """Ranks over which parameters are cut, ZeRO apart; None: none is."""

    @property
    def averaged_over(self) -> int:
        """By what DeepSpeed divides the sum of gradients: the loss is multiplied by it first."""
        return self.dp_size

    @abstractmethod
    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """The model, with random weights or none; ``settings`` are those of ds_config.json, and may be completed."""

    @abstractmethod
    def bind(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        """Called once, when DeepSpeed has taken the model."""

    def own(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's part of a micro batch of its data-parallel rank."""
        return micro_batch

    @abstractmethod
    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Cross entropy in fp32, summed over the tokens that count of what ``own`` gave."""

    def gradient_norm(self, engine: deepspeed.DeepSpeedEngine) -> float:
        """Of whole gradients on every rank (stage 0), each parameter counted once."""
        cut, whole = [], []
        for parameter in engine.module.parameters():
            if parameter.grad is None:  # frozen
                continue
            (cut if is_model_parallel_parameter(parameter) else whole).append(parameter.grad)
        squares = torch.nn.utils.get_total_norm(cut).square()
        if self.tensor_group is not None:
            dist.all_reduce(squares, group=self.tensor_group)
        return float((squares + torch.nn.utils.get_total_norm(whole).square()).sqrt())

    @property
    def owners(self) -> Mapping[str, int]:
        """See ``Engine``."""
        return {}

    @abstractmethod
    def export_blocks(self, kind: StateKind) -> Iterator[StateBlock]:
        """See ``Engine``."""

    @abstractmethod
    def load(self, kind: StateKind, source: TensorSource) -> None:
        """See ``Engine.import_state``."""

    def close(self) -> None:  # noqa: B027 (most have nothing of their own)
        """Give back process groups and hooks of its own, after DeepSpeed's."""


def split_of(rundir: RunDirectory) -> Split:
    """The split that a plan names."""
    layout = rundir.plan.layout
    if layout.implementation == "local":
        from kit.engines.deepspeed.over_megatron import OverMegatron

        return OverMegatron(rundir)
    if layout.tp > 1:
        from kit.engines.deepspeed.autotp import AutoTp

        return AutoTp(rundir)
    if layout.cp > 1:
        from kit.engines.deepspeed.ulysses import Ulysses

        return Ulysses(rundir)
    from kit.engines.deepspeed.data_parallel import Whole

    return Whole(rundir)

"""Ulysses (DeepSpeed's ALST, arXiv 2506.13996): ranks share out every sequence, and attention exchanges it for heads.

Each rank of a group has neighbouring positions of the same samples; around attention an all-to-all gives it the whole
sequence of a part of the heads (arXiv 2309.14509, figure 2). Everything else computes a position alone. ZeRO partitions
over the ranks of all groups.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kit.emit.run_directory import RunDirectory
from kit.engines.base import MicroBatch
from kit.engines.deepspeed.data_parallel import DataParallel

_ATTENTION = "sdpa"
_GROUP_FUNCTIONS = (
    "initialize_sequence_parallel",  # DeepSpeed recognises Ulysses by this name (utils/groups.py)
    "get_sequence_parallel_group",
    "get_sequence_parallel_world_size",
    "get_sequence_parallel_rank",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_world_size",
    "get_sequence_data_parallel_rank",
)
"""What DeepSpeed asks its unit of sequence parallelism for."""


def _sequence_parallel_unit() -> SimpleNamespace:
    """Collective. DeepSpeed's own unit (parallel_state_sp.py), but for model parallelism, of which there is none.

    It calls sequence-parallel ranks model-parallel too. The ZeRO optimizers know and do not ask; BF16_Optimizer (stage
    1 with accumulation) does, and leaves all but the first rank of a group out of the norm: it fails on the others.
    """
    alone, _ = dist.new_subgroups(group_size=1)
    return SimpleNamespace(
        **{name: getattr(parallel_state_sp, name) for name in _GROUP_FUNCTIONS},
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: alone,
    )


class UlyssesSequenceParallel(DataParallel):
    """Context parallelism by all-to-all; neighbouring ranks form a group."""

    def __init__(self, rundir: RunDirectory) -> None:
        super().__init__(rundir)
        self._layout = rundir.plan.layout
        self._place = dist.get_rank() % self._layout.cp
        self.dp_rank, self.dp_size = dist.get_rank() // self._layout.cp, self._layout.dp
        self._attention = ALL_ATTENTION_FUNCTIONS[_ATTENTION]

    @property
    def averaged_over(self) -> int:
        """Stages 0 to 2 divide by the data-parallel ranks alone (stage_1_and_2.py: the group's size over
        ``sequence_parallel_size``), stage 3 by all ranks of the group (comm/coalesced_collectives.py,
        reduce_scatter_coalesced)."""
        return self.dp_size * (self._layout.cp if self._layout.zero_stage == 3 else 1)

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """DeepSpeed puts its attention in the place of torch's, for every model of this process: see ``close``."""
        model = super().build(settings)
        UlyssesSPAttentionHF.register_with_transformers(
            model,
            core_attn_implementation=_ATTENTION,
            sequence_parallel_size=self._layout.cp,
            micro_batch_size=self._layout.micro_batch_size,
            seq_length_is_variable=True,
        )
        self.mpu = _sequence_parallel_unit()
        self.sequence_group = parallel_state_sp.get_sequence_parallel_group()
        return model

    def shard_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Neighbouring places, and their labels: those were shifted before the sequence is cut. Positions count from
        the start of the whole sequence."""
        inputs, labels = (
            whole.chunk(self._layout.cp, dim=1)[self._place] for whole in (micro_batch.input_ids, micro_batch.labels)
        )
        first = self._place * inputs.shape[1]
        return MicroBatch(inputs, labels, torch.arange(first, first + inputs.shape[1]).expand_as(inputs))

    def close(self) -> None:
        """Give torch's attention back to transformers, and forget the groups, which live in a module of DeepSpeed's."""
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = self._attention
        parallel_state_sp._release_sequence_parallel_groups()

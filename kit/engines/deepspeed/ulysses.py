"""Ulysses sequence parallelism (DeepSpeed's ALST, arXiv 2506.13996).

The ranks of a group split each sequence into contiguous parts. Before attention, an all-to-all gives each rank the
whole sequence for a part of the heads; after attention, another one restores the split (arXiv 2309.14509, figure 2).
All other layers compute each position independently. ZeRO shards over the ranks of all groups.
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
from kit.engines.deepspeed.data_parallel import DataParallel
from kit.engines.huggingface.whole_length_rope import keep_whole_length
from kit.engines.protocol import MicroBatch

_GROUP_FUNCTIONS = (
    "initialize_sequence_parallel",  # DeepSpeed recognises Ulysses by this name (utils/groups.py)
    "get_sequence_parallel_group",
    "get_sequence_parallel_world_size",
    "get_sequence_parallel_rank",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_world_size",
    "get_sequence_data_parallel_rank",
)
"""Functions that DeepSpeed calls on ``mpu`` under sequence parallelism."""


def _sequence_parallel_unit() -> SimpleNamespace:
    """Collective. The ``mpu`` argument of ``deepspeed.initialize``: DeepSpeed's own functions (parallel_state_sp.py)
    with a model parallel size of 1.

    DeepSpeed's own module reports sequence-parallel ranks as model-parallel ranks. The ZeRO optimizers do not use that.
    BF16_Optimizer (stage 1 with fp32 accumulation) does: it computes the norm on the first rank of a group only, and
    fails on the others.
    """
    alone, _ = dist.new_subgroups(group_size=1)
    return SimpleNamespace(
        **{name: getattr(parallel_state_sp, name) for name in _GROUP_FUNCTIONS},
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: alone,
    )


class UlyssesSequenceParallel(DataParallel):
    """Context parallelism by all-to-all. Neighbouring ranks form a group."""

    def __init__(self, rundir: RunDirectory) -> None:
        super().__init__(rundir)
        self._layout = rundir.plan.layout
        self._place = dist.get_rank() % self._layout.cp
        self.dp_rank, self.dp_size = dist.get_rank() // self._layout.cp, self._layout.dp

    @property
    def averaged_over(self) -> int:
        """Stages 0 to 2 divide by dp (stage_1_and_2.py: the group's size over ``sequence_parallel_size``), stage 3 by
        dp · cp, all ranks of the group (comm/coalesced_collectives.py, reduce_scatter_coalesced)."""
        return self.dp_size * (self._layout.cp if self._layout.zero_stage == 3 else 1)

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """Build the model. DeepSpeed replaces the model's attention for all models of this process until ``close``:
        torch's, or that within the documents of packed rows."""
        model = super().build(settings)
        config: Any = model.config
        self._name: str = config._attn_implementation
        self._attention = ALL_ATTENTION_FUNCTIONS[self._name]
        UlyssesSPAttentionHF.register_with_transformers(
            model,
            core_attn_implementation=self._name,
            sequence_parallel_size=self._layout.cp,
            micro_batch_size=self._layout.micro_batch_size,
            seq_length_is_variable=True,
        )
        keep_whole_length(model)
        self.mpu = _sequence_parallel_unit()
        self.sequence_group = parallel_state_sp.get_sequence_parallel_group()
        return model

    def shard_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's contiguous part of each sequence."""
        return micro_batch.part(lambda whole: whole.chunk(self._layout.cp, dim=1)[self._place])

    def close(self) -> None:
        """Restore the attention in transformers, and release the process groups that DeepSpeed's module keeps."""
        ALL_ATTENTION_FUNCTIONS[self._name] = self._attention
        parallel_state_sp._release_sequence_parallel_groups()

"""Context parallelism of a Hugging Face model: neighbouring ranks form a group and split each sequence.

p2p: zig-zag chunks and ring attention (kit/engines/kernels/ring_attention.py). a2a: contiguous parts; before attention
an all-to-all gives each rank the whole sequence for a part of the heads, and another one restores the split
(DeepSpeed-Ulysses, arXiv 2309.14509, figure 2). All other layers compute each position independently.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from transformers import AttentionInterface, PreTrainedModel

from kit.engines.huggingface.packed_attention import attend, documents
from kit.engines.huggingface.whole_length_rope import keep_whole_length
from kit.engines.kernels.ring_attention import local_part, ring_attention
from kit.engines.protocol import MicroBatch
from kit.specs.layout import Layout

_ATTENTION = "kit_context_parallel"


class ContextParallel:
    """The group of one rank, and its part of micro batches and of attention."""

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        """Collective. Replaces the attention of ``model``, which has no dropout (kit/engines/huggingface/models.py)."""
        found, _ = dist.new_subgroups(group_size=layout.cp)
        assert found is not None
        self.group: dist.ProcessGroup = found
        self._ring = layout.cp_comm_type == "p2p"
        keep_whole_length(model)
        AttentionInterface.register(_ATTENTION, self._attention)
        model.config._attn_implementation = _ATTENTION  # a name that masks are not made for (masking_utils.py)

    def shard_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's part of each sequence. Ring: zig-zag chunks."""
        return micro_batch.part(self._part)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._ring:
            return local_part(tensor, 1, self.group)
        return tensor.chunk(self.group.size(), dim=1)[self.group.rank()]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """An attention function of transformers. Takes (batch, heads, sequence / cp, width), keys and values with fewer
        heads; returns (batch, sequence / cp, heads, width)."""
        if self._ring:
            attended = ring_attention(query, key, value, self.group, scaling, documents())
        else:
            query, key, value = (self._whole_sequence(tensor) for tensor in (query, key, value))
            attended = self._all_heads(attend(query, key, value, scaling))
        return attended.transpose(1, 2).contiguous(), None

    def _whole_sequence(self, part: torch.Tensor) -> torch.Tensor:
        """(batch, heads, sequence / cp, width) → (batch, heads / cp, sequence, width). Fewer heads than ranks are
        repeated, so that every rank has one."""
        ranks = self.group.size()
        if part.shape[1] < ranks:
            part = part.repeat_interleave(ranks // part.shape[1], dim=1)
        by_rank = part.unflatten(1, (ranks, -1)).movedim(1, 0)
        return self._exchanged(by_rank).movedim(0, 2).flatten(2, 3)

    def _all_heads(self, whole: torch.Tensor) -> torch.Tensor:
        """(batch, heads / cp, sequence, width) → (batch, heads, sequence / cp, width)."""
        by_rank = whole.unflatten(2, (self.group.size(), -1)).movedim(2, 0)
        return self._exchanged(by_rank).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, by_rank: torch.Tensor) -> torch.Tensor:
        """All-to-all over the first dimension; backward sends the gradients back."""
        sent = by_rank.contiguous()
        received: torch.Tensor = all_to_all_single(torch.empty_like(sent), sent, group=self.group)
        return received

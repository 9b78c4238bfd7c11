"""Context parallelism by all-gather: each rank has a part of every sequence, and gathers keys and values for attention.

Sequences are split in the zig-zag order of ``kit/engines/kernels/ring_attention.py``. megatron-core's rotary embedding
uses the same order (models/common/embeddings/rope_utils.py, get_pos_emb_on_this_cp_rank).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from kit.engines.megatron.model.attention import Scores, causal_attention


def all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    scores: Scores,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the whole sequence. Arguments and result are (sequence / cp, batch,
    heads, head_dim).

    ``documents``: (batch, whole sequence). Each of the two chunks of queries is one call, with the keys up to the
    chunk's end.
    """
    key, value = (_whole_sequence(part, group) for part in (key, value))
    length = query.shape[0] // 2
    places = (group.rank(), 2 * group.size() - 1 - group.rank())
    outputs = []
    for part, place in zip(query.split(length), places, strict=True):
        end = (place + 1) * length
        seen = None if documents is None else documents[:, :end]
        outputs.append(causal_attention(part, key[:end], value[:end], scores, seen))
    return torch.cat(outputs)


def _whole_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather zig-zag parts (sequence / cp, …) to the whole sequence in order. Backward reduce-scatters the
    gradient."""
    halves = gather_from_sequence_parallel_region(part, group=group).unflatten(0, (group.size(), 2, -1))
    return torch.cat([halves[:, 0], halves[:, 1].flip(0)]).flatten(0, 1)

"""Rotary embeddings that depend on the length of the sequence, where a rank has only a part of each sequence.

transformers takes the largest position of its input for the length (modeling_rope_utils.py, dynamic_rope_update), and
chooses the frequencies of "longrope" and "dynamic" by it. A rank with the first positions would choose others than the
rank with the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kit.engines.protocol import MicroBatch

_BY_LENGTH = frozenset({"longrope", "dynamic"})

_length: int | None = None
"""``MicroBatch.whole_length`` of the current micro batch. Micro batches of rows have different lengths."""


def set_whole_length(micro_batch: MicroBatch) -> None:
    """Call before a forward pass."""
    global _length
    _length = micro_batch.whole_length


def keep_whole_length(model: torch.nn.Module) -> None:
    """Give every rotary embedding of ``model`` the last position of the longest document, after the rank's own."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not _BY_LENGTH.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds]):
            module.forward = _with_last(module.forward)


def _with_last(forward: Callable[..., Any]) -> Callable[..., Any]:
    def with_last(x: torch.Tensor, position_ids: torch.Tensor, *others: Any, **named: Any) -> Any:
        if _length is None:
            return forward(x, position_ids, *others, **named)
        last = position_ids.new_full((position_ids.shape[0], 1), _length - 1)
        cos, sin = forward(x, torch.cat([position_ids, last], dim=1), *others, **named)
        return cos[:, :-1], sin[:, :-1]

    return with_last

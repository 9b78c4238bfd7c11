"""Causal attention of a run of queries to all keys before them: whole, through a sliding window, within documents."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """(queries, batch, heads, head_dim); keys and values may be longer and have fewer heads (grouped-query attention).

    The last query stands where the last key does. ``window``: positions that a query sees, its own included.
    ``documents``: (batch, keys), on the CPU, the number of the document that a key belongs to; queries see their own.
    """
    if documents is not None:
        rows = zip(*(tensor.split(1, dim=1) for tensor in (query, key, value)), documents, strict=True)
        return torch.cat([_by_document(*row[:3], scale, window, row[3]) for row in rows], dim=1)
    if window is None or window >= key.shape[0]:
        return _attend(query, key, value, scale, _causal(query.shape[0], key.shape[0]))
    first = key.shape[0] - query.shape[0]
    outputs = []
    for start in range(0, query.shape[0], window):
        # A block of queries no longer than the window sees at most the block itself and one window before it.
        block = query[start : start + window]
        end = first + start + block.shape[0]
        begin = max(0, first + start + 1 - window)
        mask = _band(block.shape[0], end - begin, window, query.dtype, query.device)
        outputs.append(_attend(block, key[begin:end], value[begin:end], scale, mask))
    return torch.cat(outputs)


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    documents: torch.Tensor,
) -> torch.Tensor:
    """One row, a document at a time: nothing is computed across them, and no mask exists. A kernel launch for each."""
    first = key.shape[0] - query.shape[0]
    outputs, start = [], 0
    for length in torch.unique_consecutive(documents, return_counts=True)[1].tolist():
        end = start + length
        if end > first:
            part = query[max(0, start - first) : end - first]
            outputs.append(causal_attention(part, key[start:end], value[start:end], scale, window))
        start = end
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.permute(2, 0, 1, 3)


def _causal(queries: int, keys: int) -> torch.Tensor | None:
    """None for the diagonal that ``is_causal`` means: from the upper left."""
    return None if queries == keys else causal_lower_right(queries, keys)


@lru_cache(maxsize=16)  # the layers of a model ask for the same few; none of them is larger than window × 2·window
def _band(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0 where a query sees a key and −∞ elsewhere, both ending at the same position; in the dtype that the kernels add.

    transformers' rule (masking_utils.py, sliding_window_overlay): key > query − window.
    """
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)

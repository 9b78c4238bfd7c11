"""Causal attention of contiguous queries to all earlier keys, optionally with a sliding window or within documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Scores:
    """Options of a layer's attention scores, which are query·key products."""

    scale: float | None = None
    """Factor of the scores; None: 1/√head_dim."""
    window: int | None = None
    """Number of positions that a query attends to, including its own; None: all earlier positions."""
    softcap: float | None = None
    """Caps scores: cap·tanh(score/cap)."""
    sinks: torch.Tensor | None = None
    """(heads): one more score per query in the softmax, without a value."""
    dropout: float = 0.0
    """Dropout probability of the attention weights; 0 in evaluation."""


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention; all tensors, also the result, are (sequence, batch, heads, head_dim). Keys and values may be
    longer than queries, and have fewer heads (grouped-query attention).

    The last query and the last key have the same position. ``documents``: (batch, keys), on the CPU: each key's
    document number. Queries attend to keys of their own document only.
    """
    if documents is not None:
        tensors = (tensor.split(1, dim=1) for tensor in (query, key, value))
        rows = zip(*tensors, documents, strict=True)
        return torch.cat([_by_document(q, k, v, scores, row) for q, k, v, row in rows], dim=1)
    window = scores.window
    if window is None or window >= key.shape[0]:
        return _attend(query, key, value, scores, None)
    first = key.shape[0] - query.shape[0]
    outputs = []
    for start in range(0, query.shape[0], window):
        # A block of at most ``window`` queries attends to the block itself and to at most ``window`` earlier keys.
        block = query[start : start + window]
        end = first + start + block.shape[0]
        begin = max(0, first + start + 1 - window)
        mask = _band(block.shape[0], end - begin, window, query.dtype, query.device)
        outputs.append(_attend(block, key[begin:end], value[begin:end], scores, mask))
    return torch.cat(outputs)


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    documents: torch.Tensor,
) -> torch.Tensor:
    """Attention of one row, with one kernel call per document and without a mask."""
    first = key.shape[0] - query.shape[0]
    outputs, start = [], 0
    for length in torch.unique_consecutive(documents, return_counts=True)[1].tolist():
        end = start + length
        if end > first:
            part = query[max(0, start - first) : end - first]
            outputs.append(causal_attention(part, key[start:end], value[start:end], scores))
        start = end
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor | None
) -> torch.Tensor:
    """``mask``: added to the scores; None: causal, the last query and the last key have the same position."""
    queries, keys, grouped = query.shape[0], key.shape[0], query.shape[2] != key.shape[2]
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if scores.softcap is not None or scores.sinks is not None:  # torch has no fused kernel for these
        mask = _band(queries, keys, keys, query.dtype, query.device) if mask is None else mask
        return _materialised(query, key, value, scores, mask).permute(2, 0, 1, 3)
    if mask is None and queries != keys:
        mask = causal_lower_right(queries, keys)
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,  # torch aligns the causal mask to the upper left
        dropout_p=scores.dropout,
        scale=scores.scale,
        enable_gqa=grouped,
    )
    return attended.permute(2, 0, 1, 3)


def _materialised(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor
) -> torch.Tensor:
    """Attention with materialised scores; tensors are (batch, heads, sequence, head_dim). The softmax is in fp32, as in
    transformers (modeling_gemma2.py, modeling_gpt_oss.py, eager_attention_forward)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    products = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products + mask
    if scores.sinks is not None:
        sinks = scores.sinks.to(products.dtype).view(1, -1, 1, 1).expand(*products.shape[:-1], 1)
        products = torch.cat([products, sinks], dim=-1)
    weights = products.softmax(-1, dtype=torch.float32).to(value.dtype)
    weights = F.dropout(weights, scores.dropout)
    return weights[..., : key.shape[2]] @ value


@lru_cache(maxsize=16)  # layers share a few masks; with a window, at most window × 2·window elements
def _band(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Mask (queries, keys) in ``dtype``: 0 where a query attends to a key, −∞ elsewhere. The last query and the last
    key have the same position.

    A query attends to key > query − window, as in transformers (masking_utils.py, sliding_window_overlay).
    """
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)

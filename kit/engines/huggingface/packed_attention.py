"""Attention within the documents of packed rows, a document at a time, by the kernels that need no mask.

transformers makes a mask of (sequence, sequence) for each row and hands it to ``scaled_dot_product_attention``, whose
fast kernels take none: every score of the row is computed, most of them to be thrown away, and the device is asked
where documents begin. Here they are known on the host, from the data, and each is a causal call of its own: the work
falls from s² to the sum of squares, nothing waits, and no mask exists. A call a document and layer is the price: rows
of some tens of documents, not of thousands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kit.engines.base import MicroBatch
from kit.specs.model import ModelSpec

NAME = "kit_documents"

_lengths: list[list[int]] | None = None
"""Lengths of the documents of each row of the current micro batch; None: a row is one document.

It is in the module, not in the call: recompute runs the layers again while backward runs, maybe in another thread,
before the next micro batch."""


def attend_by_document(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Let ``model`` compute packed rows so. It goes on by transformers' masks with sliding windows, which are masks
    themselves, and where attention is not one operator."""
    if spec.traits.packed_attention and spec.sliding_window is None and spec.traits.fused_attention:
        AttentionInterface.register(NAME, _attention)
        model.config._attn_implementation = NAME  # a name that masks are not made for (masking_utils.py)


def set_documents(micro_batch: MicroBatch) -> None:
    """Call before a forward pass. Its backward pass uses the same documents."""
    global _lengths
    ids = micro_batch.sequence_ids
    _lengths = None if ids is None else [row.unique_consecutive(return_counts=True)[1].tolist() for row in ids]


# Lengths differ in every micro batch: a graph for each would be made.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa: (batch, heads, sequence, width) each, fewer heads of keys and values; → (batch, sequence,
    heads, width)."""
    if _lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=True, **others
        )
    rows = []
    for row, lengths in enumerate(_lengths):
        parts = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query, key, value)]
        attended = [
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
            for q, k, v in zip(*parts, strict=True)
        ]
        rows.append(torch.cat(attended, dim=2))
    return torch.cat(rows).transpose(1, 2).contiguous(), None

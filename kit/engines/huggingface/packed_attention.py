"""Attention within the documents of packed rows: one causal call per document, without a mask.

transformers builds a mask (sequence, sequence) for each row, and asks the device where documents begin. The fast
kernels of ``scaled_dot_product_attention`` take no mask, so all scores of the row are computed, also between documents.
Here the host knows the documents' lengths from the data, and calls the kernel once per document. The work falls from s²
to the sum of the squared lengths, and the host does not wait. The price is one call per document and layer, which suits
rows of tens of documents, not of thousands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from kit.engines.protocol import MicroBatch
from kit.specs.model import ModelSpec

NAME = "kit_documents"

_lengths: list[list[int]] | None = None
"""Lengths of the documents of each whole row of the current micro batch; None: a row is one document.

A module global, because recompute runs the layers again in backward, maybe in another thread."""


def attend_by_document(model: PreTrainedModel, spec: ModelSpec, split: bool) -> None:
    """Make ``model`` use this module's attention. A model keeps transformers' masks if it has a sliding window, or if
    its attention is not one operator. ``split``: ranks have parts of rows, for which transformers makes no masks."""
    own = spec.traits.packed_attention and spec.sliding_window is None and spec.traits.fused_attention
    if own or split:
        AttentionInterface.register(NAME, _attention)
        model.config._attn_implementation = NAME  # a name that masks are not made for (masking_utils.py)


def set_documents(micro_batch: MicroBatch) -> None:
    """Call before a forward pass. Its backward pass uses the same documents."""
    global _lengths
    ids = micro_batch.sequence_ids
    _lengths = None if ids is None else [row.unique_consecutive(return_counts=True)[1].tolist() for row in ids]


def documents() -> list[list[int]] | None:
    """Lengths of the documents of each whole row of the current micro batch; None: a row is one document."""
    return _lengths


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, dropout: float = 0.0
) -> torch.Tensor:
    """Causal attention within the documents of whole rows. Tensors are (batch, heads, sequence, width); keys and values
    may have fewer heads."""

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )

    if _lengths is None:
        return kernel(query, key, value)
    rows = []
    for row, lengths in enumerate(_lengths):
        parts = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query, key, value)]
        rows.append(torch.cat([*map(kernel, *parts)], dim=2))
    return torch.cat(rows)


# Lengths differ in every micro batch, and torch.compile would build a graph for each.
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
    """An attention function of transformers. Takes (batch, heads, sequence, width), keys and values with fewer heads;
    returns (batch, sequence, heads, width)."""
    return attend(query, key, value, scaling, dropout).transpose(1, 2).contiguous(), None

"""A micro batch as the call of a Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch

from kit.engines.base import MicroBatch


def call_arguments(micro_batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Keyword arguments; no labels, for the loss is ours.

    Packed rows need no mask of ours: where positions start again transformers ends attention too, within a sliding
    window as well (masking_utils.py, find_packed_sequence_indices), and padding is a document of its own. Padding after
    a single row, or after a decoder's, needs none either: attention is causal.
    """

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    if micro_batch.source_ids is not None and micro_batch.source_mask is not None:
        return {
            "input_ids": there(micro_batch.source_ids),
            "attention_mask": there(micro_batch.source_mask),
            "decoder_input_ids": there(micro_batch.input_ids),
            "use_cache": False,
        }
    arguments: dict[str, Any] = {"input_ids": there(micro_batch.input_ids), "use_cache": False}
    if micro_batch.position_ids is not None:
        arguments["position_ids"] = there(micro_batch.position_ids)
    return arguments

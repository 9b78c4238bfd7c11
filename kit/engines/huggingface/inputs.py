"""A micro batch as the call of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils

from kit.engines.base import MicroBatch
from kit.engines.huggingface.packed_attention import set_documents


def call_arguments(micro_batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Keyword arguments; no labels, for the loss is ours.

    Packed rows need no mask of ours: where positions start again transformers ends attention too, within a sliding
    window as well (masking_utils.py, find_packed_sequence_indices), and padding is a document of its own. Padding after
    a single row, or after a decoder's, needs none either: attention is causal.
    """

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    if micro_batch.source_ids is not None and micro_batch.source_mask is not None:
        return {
            "input_ids": to_device(micro_batch.source_ids),
            "attention_mask": to_device(micro_batch.source_mask),
            "decoder_input_ids": to_device(micro_batch.input_ids),
            "use_cache": False,
        }
    arguments: dict[str, Any] = {"input_ids": to_device(micro_batch.input_ids), "use_cache": False}
    if micro_batch.position_ids is not None:
        arguments["position_ids"] = to_device(micro_batch.position_ids)
    return arguments


@contextmanager
def packed_sequence_context(micro_batch: MicroBatch) -> Iterator[None]:
    """Around a forward pass: transformers need not look at positions where they are known to start once a row.

    It asks the device (masking_utils.py, find_packed_sequence_indices, ``.all()`` in an if), and the host waits for
    everything launched so far, once every micro batch. Its answer would be the one given here.
    """
    set_documents(micro_batch)
    asking = masking_utils.find_packed_sequence_indices
    if micro_batch.position_ids is None:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asking

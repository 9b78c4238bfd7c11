"""Converts a micro batch to the arguments of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils

from kit.engines.huggingface.packed_attention import set_documents
from kit.engines.huggingface.whole_length_rope import set_whole_length
from kit.engines.protocol import MicroBatch


def call_arguments(micro_batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model, on ``device``; without labels, because kit computes the loss.

    No attention mask is needed, except for an encoder's input. In packed rows, transformers masks documents by their
    positions, with sliding windows too (masking_utils.py, find_packed_sequence_indices), and padding is a document of
    its own. Padding after a single row or in a decoder does not matter, because attention is causal.
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
    """While entered, transformers does not search positions for packed rows if the micro batch has none.

    That search (masking_utils.py, find_packed_sequence_indices, ``.all()`` in an if) makes the host wait for the device
    in every micro batch. Its result is known here.
    """
    set_documents(micro_batch)
    set_whole_length(micro_batch)
    asking = masking_utils.find_packed_sequence_indices
    if micro_batch.position_ids is None:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asking

"""A Hugging Face model as a plan wants it computed, and a micro batch through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, masking_utils

from kit.emit.run_directory import RunDirectory
from kit.engines.base import MicroBatch
from kit.engines.huggingface.packed_attention import attend_by_document, set_documents
from kit.engines.kernels.chunked_loss import ChunkedLoss
from kit.engines.kernels.compiled_blocks import compile_layers
from kit.engines.kernels.loss import summed_cross_entropy


def prepare(model: PreTrainedModel, rundir: RunDirectory) -> ChunkedLoss | None:
    """Recompute, attention within documents, compiled blocks; returns what takes the head's place, where the plan has
    that. Raises EngineError where the model or the machine cannot."""
    plan, layout = rundir.plan, rundir.plan.layout
    if layout.recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    if rundir.run.data.packing and layout.cp == 1:  # Ulysses has an attention of its own
        attend_by_document(model, plan.model)
    if layout.compile_layers:
        compile_layers(model)
    if not layout.chunked_loss:
        return None
    return ChunkedLoss(model, compiled=layout.compile_layers, kernel=layout.loss_kernel)


def summed_loss(
    model: Callable[..., Any], micro_batch: MicroBatch, device: torch.device, chunked: ChunkedLoss | None
) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that count; computed in fp32. ``chunked``: of ``prepare``."""
    labels = micro_batch.labels.to(device, non_blocking=True)
    arguments = call_arguments(micro_batch, device)
    with packed_sequence_context(micro_batch), nullcontext() if chunked is None else chunked.of(labels):
        logits: torch.Tensor = model(**arguments).logits
    return summed_cross_entropy(logits, labels) if chunked is None else logits


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

"""Applies a plan's recompute, attention and compilation to a Hugging Face model, and computes a micro batch's loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from kit.engines.huggingface.expert_autocast import cast_experts
from kit.engines.huggingface.inputs import call_arguments, packed_sequence_context
from kit.engines.huggingface.packed_attention import attend_by_document
from kit.engines.kernels.chunked_loss import ChunkedLoss
from kit.engines.kernels.compiled_blocks import compile_layers
from kit.engines.kernels.loss import summed_cross_entropy
from kit.engines.kernels.offloaded_inputs import offload_inputs
from kit.engines.kernels.selective_recompute import contexts
from kit.engines.kernels.tiled_mlp import tile_mlps
from kit.engines.protocol import MicroBatch
from kit.planner.plan import Plan
from kit.specs.layout import Layout


def prepare(model: PreTrainedModel, plan: Plan, packing: bool) -> ChunkedLoss | None:
    """Turn on recompute, tiled MLPs, attention within documents (``packing``) and compiled blocks, as the plan says.
    Returns the chunked loss, or None if the plan has none. Raises EngineError if the model or the machine does not
    support it."""
    layout = plan.layout
    cast_experts(model)
    recompute(model, layout)
    if layout.tiled_mlp:
        tile_mlps(model)
    if packing:
        attend_by_document(model, plan.model, split=layout.cp > 1)
    if layout.compile_layers:
        compile_layers(model)
    if not layout.chunked_loss:
        return None
    return ChunkedLoss(model, compiled=layout.compile_layers)


def recompute(model: PreTrainedModel, layout: Layout) -> None:
    """Turn on the recompute of a layout, with its layer inputs on the host if it says so."""
    if layout.recompute == "none":
        return
    how = {"context_fn": contexts} if layout.recompute == "selective" else {}
    model.activation_checkpointing_enable({"use_reentrant": False, **how})
    if layout.activation_offloading:
        offload_inputs(model)


def summed_loss(
    model: Callable[..., Any], micro_batch: MicroBatch, device: torch.device, chunked: ChunkedLoss | None
) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that are not ``IGNORE_INDEX``: an fp32 scalar. ``chunked``: the
    result of ``prepare``."""
    labels = micro_batch.labels.to(device, non_blocking=True)
    arguments = call_arguments(micro_batch, device)
    with packed_sequence_context(micro_batch), nullcontext() if chunked is None else chunked.of(labels):
        logits: torch.Tensor = model(**arguments).logits
    return summed_cross_entropy(logits, labels) if chunked is None else logits

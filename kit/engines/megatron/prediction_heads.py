"""Scales the loss of multi-token prediction to the step's loss, and records it.

megatron-core adds this loss in backward (transformer/multi_token_prediction.py, MTPLossAutoScaler). The loss is a sum
over tokens, like the engine's, but megatron-core also multiplies it by ``config.grad_scale_func``, which kit uses for
router losses (``routing.py``).

megatron-core 0.19 multiplies a head's loss by the tokens of the micro batch over those that the head predicts
(``process_mtp_loss``), which on a rank of few tokens is another loss than on one of many. Here it stays 0.16's sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper, roll_tensor
from megatron.core.transformer.transformer_config import TransformerConfig


class PredictionHeads:
    """The heads of one rank; of ranks before the last pipeline stage, none."""

    def __init__(self, config: TransformerConfig) -> None:
        self._config, self._heads = config, config.mtp_num_layers or 0
        self._factor = config.mtp_loss_scaling_factor
        self._loss: torch.Tensor | None = None
        MTPLossLoggingHelper.tracker.clear()
        gpt_model.process_mtp_loss = add_losses  # 0.16 does not call it

    def begin(self, scale: torch.Tensor | None) -> None:
        """Begin a step. ``scale``: the factor of ``grad_scale_func``; None without one."""
        self._config.mtp_loss_scaling_factor = self._factor if scale is None else self._factor / scale

    def end(self, num_micro_batches: int) -> None:
        """Collective. Take the mean loss of the step over micro batches, heads and ranks."""
        if not self._heads:
            return
        tracker = MTPLossLoggingHelper.tracker
        self._loss = torch.zeros((), device=torch.cuda.current_device())
        if "values" in tracker:
            self._loss = tracker["values"].mean() / num_micro_batches
            dist.all_reduce(self._loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            self._loss /= parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        tracker.clear()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(self._loss, src=last, group=parallel_state.get_pipeline_model_parallel_group())

    def metrics(self) -> Mapping[str, float | None]:
        """Fields of ``StepMetrics``; empty without heads. Waits for the device. None if a context-parallel rank had no
        label that counts: megatron-core then divides by zero."""
        if self._loss is None:
            return {}
        loss = float(self._loss)
        return {"mtp_loss": loss if math.isfinite(loss) else None}


def add_losses(
    *,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
    config: Any,
    **given: Any,
) -> torch.Tensor:
    """0.19's ``process_mtp_loss`` with 0.16's loss (models/gpt/gpt_model.py there). Returns the main hidden states."""
    hidden, *of_heads = torch.chunk(hidden_states, 1 + config.mtp_num_layers, dim=0)
    if labels is None:
        return hidden
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    ahead = {"shifts": -1, "dims": -1, "cp_group": given["cp_group"], "packed_seq_params": given["packed_seq_params"]}
    output = {"weight": given["output_weight"], "runtime_gather_output": given["runtime_gather_output"]}
    for head, states in enumerate(of_heads):
        logits, _ = given["output_layer"](states, **output)
        labels, _ = roll_tensor(labels, **ahead)
        mask, num_tokens = roll_tensor(mask, **ahead)
        loss = mask * given["compute_language_model_loss"](labels, logits)
        if given["is_training"]:
            values = MTPLossLoggingHelper.tracker.setdefault("values", torch.zeros(len(of_heads), device=loss.device))
            values[head] += loss.detach().sum() / num_tokens
        hidden = MTPLossAutoScaler.apply(hidden, config.mtp_loss_scaling_factor / config.mtp_num_layers * loss)
    return hidden

"""Scales the loss of multi-token prediction to the step's loss, and records it.

megatron-core adds this loss in backward (transformer/multi_token_prediction.py, MTPLossAutoScaler). The loss is a sum
over tokens, like the engine's, but megatron-core also multiplies it by ``config.grad_scale_func``, which kit uses for
router losses (``routing.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig


class PredictionHeads:
    """The heads of one rank; of ranks before the last pipeline stage, none."""

    def __init__(self, config: TransformerConfig) -> None:
        self._config, self._heads = config, config.mtp_num_layers or 0
        self._factor = config.mtp_loss_scaling_factor
        self._loss: torch.Tensor | None = None
        MTPLossLoggingHelper.tracker.clear()

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

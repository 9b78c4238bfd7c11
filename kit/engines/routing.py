"""Routing metrics of one optimizer step, over all ranks: tokens per expert, balancing losses, router biases."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist


class RoutingRecord:
    """Sums over the micro batches of a step, per layer. Layers with experts are numbered from 0; without any it does
    nothing."""

    def __init__(self, experts: int, layers: int, device: torch.device | int) -> None:
        self._experts = experts
        # Columns: tokens per expert, bias per expert, (token, expert) pairs before drops, auxiliary loss, z loss.
        self._sums = torch.zeros(layers, 2 * experts + 3, dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Set all sums to zero. Call this at the start of a step."""
        self._sums.zero_()

    def add_tokens(self, layer: int, tokens: torch.Tensor, chosen: int) -> None:
        """``tokens``: (experts), tokens that each expert computed. ``chosen``: number of (token, expert) pairs that the
        router chose, dropped pairs included."""
        self._sums[layer, : self._experts] += tokens
        self._sums[layer, -3] += chosen

    def add_losses(self, layer: int, auxiliary: torch.Tensor | float, z: torch.Tensor | float) -> None:
        """Add this rank's part of the step's mean auxiliary loss and z loss, before their coefficients."""
        self._sums[layer, -2] += auxiliary
        self._sums[layer, -1] += z

    def set_bias(self, layer: int, bias: torch.Tensor, copies: int) -> None:
        """``bias``: (experts). ``copies``: number of ranks with an equal bias, which ``reduce`` adds up."""
        self._sums[layer, self._experts : -3] = bias.double() / copies

    def reduce(self) -> None:
        """Collective. All-reduce the sums over all ranks."""
        if len(self._sums):
            dist.all_reduce(self._sums)

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens per expert: (layers, experts), fp64."""
        return self._sums[:, : self._experts]

    def metrics(self, losses: bool, biases: bool) -> Mapping[str, float | None]:
        """Fields of ``StepMetrics``; empty without experts. Waits for the device. ``losses``, ``biases``: whether the
        job uses balancing losses, and whether the routers have biases; otherwise the metric is None."""
        if not len(self._sums):
            return {}
        sums = self._sums.cpu()
        tokens, bias = sums[:, : self._experts], sums[:, self._experts : -3]
        share = tokens / tokens.sum(1, keepdim=True).clamp(min=1)
        entropy = -(share * share.clamp(min=1e-30).log()).sum(1) / math.log(max(2, self._experts))
        return {
            "expert_load_max": float(share.max()) * self._experts,
            "expert_load_entropy": float(entropy.min()),
            "dead_experts": int((tokens == 0).sum()),
            "dropped_tokens": 1 - float(tokens.sum() / sums[:, -3].sum().clamp(min=1)),
            "router_aux_loss": float(sums[:, -2].mean()) if losses else None,
            "router_z_loss": float(sums[:, -1].mean()) if losses else None,
            "expert_bias_range": float((bias.max(1).values - bias.min(1).values).max()) if biases else None,
        }

"""Experts of Hugging Face models under torch.autocast.

Autocast does not know ``grouped_mm``, so transformers would multiply fused experts in the dtype of their weights: in
fp32, for which CUDA has no kernel of its own (aten/src/ATen/native/GroupedMMUtils.h, _grouped_mm_fallback). kit casts
the weights for each call, as autocast does for linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

_NAME = "grouped_mm_autocast"


class _Cast:
    """A module of experts with its weights in ``dtype``; everything else is the module's."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.__dict__.update({name: weight.to(dtype) for name, weight in module.named_parameters(recurse=False)})
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _forward(module: Any, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    """Experts of ``hidden_states`` (tokens, hidden size); ``routing``: expert numbers and weights, (tokens, k) each."""
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind):
        module = _Cast(module, torch.get_autocast_dtype(kind))
    return grouped_mm_experts_forward(module, hidden_states, *routing)


def cast_experts(model: PreTrainedModel) -> None:
    """Under autocast, experts of ``model`` compute in autocast's dtype, as its linear layers do. No effect on models
    without experts, and without autocast."""
    if model.config._experts_implementation == "grouped_mm":
        ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
        model.config._experts_implementation = _NAME

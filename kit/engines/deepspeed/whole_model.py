"""The model that a rank gives to DeepSpeed below stage 3: whole, in the dtype that DeepSpeed would cast it to.

Stages 1 and 2 copy all parameters into one flat buffer, of which the parameters are views from then on
(stage_1_and_2.py and bf16_optimizer.py, flatten). The engine sets their values afterwards, so before they need no
memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from kit.engines.huggingface.models import build_skeleton
from kit.specs.model import ModelSpec


def whole_model(spec: ModelSpec, zero_stage: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model on ``device`` whose parameters are zero. Buffers keep their own dtypes, as under DeepSpeed (engine.py,
    _cast_module_mixed_precision)."""
    model = build_skeleton(spec, device)
    made = {id(p): torch.nn.Parameter(torch.zeros_like(p, dtype=dtype, device=device)) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[id(parameter)])  # a tied parameter stays one
    if zero_stage in (1, 2):
        share_memory(model.parameters())
    return model


def share_memory(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give all parameters of one dtype the memory of the largest. Their values are lost."""
    largest: dict[torch.dtype, torch.Tensor] = {}
    for parameter in sorted(parameters, key=torch.numel, reverse=True):
        common = largest.setdefault(parameter.dtype, parameter.data.flatten())
        parameter.data = common[: parameter.numel()].view(parameter.shape)

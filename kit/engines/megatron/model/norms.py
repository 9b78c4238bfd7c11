"""Norms with support for sequence parallelism.

Each tensor-parallel rank then normalises its part of the sequence only, so the gradients of the norm's parameters must
be summed over these ranks. ``sequence_parallel`` on a parameter makes megatron-core's
``distributed/finalize_model_grads.py`` do so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension. The scale is 1 + weight if the configuration says
    ``layernorm_zero_centered_gamma``."""

    weight: Any  # a parameter on which megatron-core reads attributes

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self._zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, hidden size) → the same shape and dtype."""
        if not self._zero_centred:
            return super().forward(x)
        # In fp32, as in transformers (modeling_gemma2.py, Gemma2RMSNorm): 1 + weight would lose bits in bf16.
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm over the last dimension."""

    weight: Any
    bias: Any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel


class WidthRMSNorm(torch.nn.Module):
    """Root-mean-square norm over all heads together (OLMo 2, MiniMax M2). Each tensor-parallel rank has some heads."""

    weight: Any

    def __init__(self, config: TransformerConfig, heads: int, head_dim: int) -> None:
        """``heads``: number of query or key heads of the whole model."""
        super().__init__()
        device, own = torch.cuda.current_device(), heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.empty(own * head_dim, device=device, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self._eps, self._width = config.layernorm_epsilon, heads * head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sequence, batch, heads / tp, head_dim) → the same shape and dtype. All-reduces the sum of squares over
        tensor-parallel ranks, in backward also its gradient."""
        own = x.float().flatten(2)
        squares = reduce_from_tensor_model_parallel_region(own.square().sum(-1, keepdim=True))
        mean = copy_to_tensor_model_parallel_region(squares) / self._width
        return (own * torch.rsqrt(mean + self._eps) * self.weight).type_as(x).view_as(x)


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""Value of the configuration's ``normalization`` → norm class."""

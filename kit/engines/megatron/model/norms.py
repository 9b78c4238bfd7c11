"""Norms that take part in sequence parallelism.

Each tensor-parallel rank then sees its part of the sequence only, so gradients of their parameters must be summed over
them: ``sequence_parallel`` on a parameter asks ``distributed/finalize_model_grads.py`` for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension; scaled by 1 + weight where the configuration centres on zero."""

    weight: Any  # a parameter on which megatron-core reads attributes

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self._zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype."""
        if not self._zero_centred:
            return super().forward(x)
        # In fp32, as transformers has it (modeling_gemma2.py, Gemma2RMSNorm): 1 + weight would lose bits in bf16.
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm over the last dimension."""

    weight: Any
    bias: Any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""Norm classes by the configuration's ``normalization``."""

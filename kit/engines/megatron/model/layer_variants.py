"""Ways into and out of the residual stream that megatron-core's own layers do not have."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from kit.engines.megatron.model.norms import NORMS


class NormedRowParallelLinear(RowParallelLinear):
    """The last projection of attention or MLP with a norm of its result, before it is added (Gemma 2 and 3, OLMo)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = NORMS[config.normalization](config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(sequence, batch, input / tp) → (sequence, batch, output), summed over tensor-parallel ranks; no bias."""
        output, bias = super().forward(input_)
        assert bias is None
        return self.post_layernorm(output), None


class ScaledRowParallelLinear(RowParallelLinear):
    """The last projection of attention or MLP with a factor of its result, before it is added (Granite)."""

    factor: float

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(sequence, batch, input / tp) → (sequence, batch, output), summed over tensor-parallel ranks; no bias."""
        output, bias = super().forward(input_)
        assert bias is None
        return output * self.factor, None


class ExpertRowParallelLinear(RowParallelLinear):
    """The last projection of an expert, whose bias is that expert's alone: rules cut no expert that has one.

    megatron-core treats it as the bias of any row-parallel layer, which all tensor-parallel ranks have: under sequence
    parallelism it would add up the gradients of other ranks' experts, and it counts in the norm those of one rank only.
    """

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        if self.bias is not None:
            self.bias.sequence_parallel = False
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Forward of RowParallelLinear with a copy of the output: the MLP adds the bias in place, and autograd forbids
        that where an all-reduce over one rank returns its input."""
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


class ParallelResidualLayer(TransformerLayer):
    """Attention and MLP read the same input, and both are added to it (GPT-NeoX, GPT-J)."""

    _layer_input: torch.Tensor | None = None

    def _forward_attention(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._layer_input = hidden_states
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        layer_input, self._layer_input = self._layer_input, None
        return super()._forward_pre_mlp_layernorm(layer_input)
